"""compressed-tensors, llmcompressor's format: groups of modules, each with a layout of its own.

| layout | tensors of a weight of [rows, columns] |
|---|---|
| pack-quantized | weight_packed [rows, words], weight_scale [rows, groups], weight_shape, weight_zero_point |
| int-, float-, naive-quantized | weight, weight_scale: `eight_bits.py` |
| nvfp4-pack-quantized | weight_packed, weight_scale, weight_global_scale: `nvfp4.py` |
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slimqwen.formats.eight_bits import EightBits
from slimqwen.formats.format import FLOATING, ORDERED, Format, Layout, Parts, Precision, Stored
from slimqwen.formats.nvfp4 import CompressedNvfp4

if TYPE_CHECKING:
    from torch import Tensor

METHOD = "compressed-tensors"
_PACKED = "pack-quantized"
_EIGHT_BITS = ("int-quantized", "float-quantized", "naive-quantized")


@dataclass(frozen=True)
class PackedIntegers(Layout):
    """Integers without gaps in words of 32 bits, lowest bits first, as compressed-tensors 0.19 and vLLM have them.

    Attributes:
        bits: bits per weight.
        group_size: columns that share a scale; None for one scale a row.
        symmetric: whether there are no zero points.
    """

    bits: int
    group_size: int | None
    symmetric: bool = True

    carrier = "weight_packed"
    dtypes = ("I32",)
    word_bits = 32
    required = ("weight_scale", "weight_shape")
    optional = ("weight_g_idx", "input_scale", "input_zero_point", "input_global_scale")
    further = ("weight_zero_point",)
    by_row = ("weight_packed", "weight_scale")
    by_weight = optional

    def has_cpu_kernel(self, module: str) -> bool:
        """Whether vLLM's CPU build has a kernel for the weight of this module in this layout.

        It has kernels for 4 bits, for symmetric 8 bits with one scale a row, and for embeddings in symmetric 2, 4 or 8
        bits. GPUs from compute capability 7.5 on take 2 to 8 bits: Marlin (on 9.0 Machete or Humming) 4, and 8 without
        zero points, Humming the rest, which it compiles at its first use (`choose_mp_linear_kernel` of vLLM).
        """
        if module.endswith("embed_tokens"):
            return self.symmetric and self.bits in (2, 4, 8)
        return self.bits == 4 or (self.bits == 8 and self.symmetric and self.group_size is None)

    def parts(self, rows: int, columns: int) -> Parts:
        """The stored tensors: words, scales and the shape; zero points are packed along the rows."""
        groups = -(-columns // self.group_size) if self.group_size else 1
        parts: Parts = {
            "weight_packed": ((rows, -(-columns * self.bits // 32)), ("I32",)),
            "weight_scale": ((rows, groups), FLOATING),
            "weight_shape": ((2,), ("I64", "I32")),
        }
        if not self.symmetric:
            parts["weight_zero_point"] = ((-(-rows * self.bits // 32), groups), ("I32",))
        return parts

    def shape(self, parts: Stored) -> tuple[int, ...]:
        """[rows, columns] from weight_shape, because a row may end within a word."""
        return tuple(parts["weight_shape"].unchanged().read().tolist())

    def unreadable(self, parts: Stored) -> str | None:
        """Why the weight cannot be read: its columns are in the order of their activations; else None."""
        return "packed otherwise than in consecutive groups" if "weight_g_idx" in parts else None

    def read(self, parts: Stored, first: int, last: int) -> "Tensor":
        """Rows as numbers: (integers - zero points) x scales."""
        import torch
        from compressed_tensors.compressors import unpack_from_int32

        words, scales = (parts[f"weight_{part}"].rows(first, last).read() for part in ("packed", "scale"))
        integers = unpack_from_int32(words, self.bits, torch.Size((last - first, self.shape(parts)[1])))
        groups: Tensor = integers.float().reshape(*scales.shape, -1)
        if zeros := parts.get("weight_zero_point"):
            packed = zeros.rows(first * self.bits // 32, -(-last * self.bits // 32)).read()
            points = unpack_from_int32(packed, self.bits, scales.shape, packed_dim=0)
            groups = groups - points.float().unsqueeze(2)
        return (groups * scales.float().unsqueeze(2)).flatten(1)


class CompressedTensors(Format):
    """quant_method compressed-tensors; embedding, lm_head and draft head may be packed like linears."""

    methods = (METHOD,)
    layouts = (PackedIntegers, EightBits, CompressedNvfp4)
    takes_more = True
    is_exact = True
    needs_cache_scheme = True

    @property
    def _groups(self) -> list[Mapping[str, Any]]:
        """Groups with weights; a target that names modules takes precedence over one that names a class."""
        groups = [group for group in self.settings.get("config_groups", {}).values() if group.get("weights")]
        return sorted(groups, key=lambda group: not _CLASSES.isdisjoint(group["targets"]))

    def describe(self) -> str:
        """The format with the bits and types of its weights, in words."""
        weights = [group["weights"] for group in self._groups]
        return ", ".join(
            dict.fromkeys([METHOD, *(f"{each['num_bits']}-bit {each['type']}" for each in weights)])
        )

    def _group_of(self, module: str) -> Mapping[str, Any] | None:
        if any(matches(entry, module) for entry in self.settings.get("ignore") or ()):
            return None
        groups = self._groups
        return next(
            (group for group in groups if any(matches(entry, module) for entry in group["targets"])), None
        )

    def packs(self, module: str) -> bool:
        """Whether the module is quantised: a target matches it, and no entry of `ignore` does."""
        return self._group_of(module) is not None

    def layouts_of(self, module: str) -> list[Layout]:
        """The layout of the module's group; for a module without a group, the layouts of all groups."""
        group = self._group_of(module)
        layouts = map(self._layout, [group] if group else self._groups)
        return [layout for layout in layouts if layout]

    def _layout(self, group: Mapping[str, Any]) -> Layout | None:
        weights, form = group["weights"], group.get("format") or self.settings.get("format", _PACKED)
        size = weights.get("group_size") or -1
        if form == _PACKED:
            return PackedIntegers(
                weights["num_bits"], size if size > 0 else None, weights.get("symmetric", True)
            )
        if form in _EIGHT_BITS:
            height, width = weights.get("block_structure") or (1, size if size > 0 else None)
            is_single = weights.get("strategy") == "tensor"
            precision: Precision = "int8" if weights.get("type") == "int" else "fp8"
            return EightBits(precision, (None, None) if is_single else (height, width))
        return CompressedNvfp4() if form == "nvfp4-pack-quantized" else None

    def refused(self) -> str | None:
        """Why vLLM refuses the checkpoint: its groups are in the order of activations; else None."""
        for group in self._groups:
            weights = group["weights"]
            if weights.get("actorder") in ("group", "dynamic", True) and weights.get("group_size") != -1:
                return ORDERED
        return None


_CLASSES = frozenset({"Linear", "Embedding"})
_TABLES = ("embed_tokens", "lm_head", "draft_head")
"""Last parts of the names of modules with a row for each token, which vLLM does not take for linears."""


def matches(entry: str, module: str) -> bool:
    """Whether an entry of `targets` or `ignore` (a name, class or pattern) matches a linear or a table.

    Names and patterns match as by compressed_tensors.utils.match.match_name, whose import takes seconds. The class
    `Linear` matches no output head, as in vLLM; only its name or a pattern does.
    """
    if entry.startswith("re:"):
        return re.match(entry[3:], module) is not None
    if entry == "Linear":
        return not module.endswith(_TABLES)
    return entry == module or (entry == "Embedding" and module.endswith("embed_tokens"))


def config_group(target: str, bits: int, group_size: int | None) -> dict[str, Any]:
    """A symmetric config group for the modules that a target matches; without `group_size`, one scale per row."""
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": "channel" if group_size is None else "group",
        "group_size": group_size,
        "dynamic": False,
    }
    return {"targets": [target], "weights": weights, "format": _PACKED}


def settings_of(groups: Mapping[str, Any], ignore: Collection[str]) -> dict[str, Any]:
    """Make a quantization_config of packed integers from its config groups and ignored modules."""
    return {
        "quant_method": METHOD,
        "format": _PACKED,
        "quantization_status": "compressed",
        "config_groups": dict(groups),
        "ignore": list(ignore),
    }


ADDED = frozenset({"mtp", *_TABLES})
"""Names of the config groups of what is packed beside the layers, before or after them."""


def with_group(
    before: Mapping[str, Any], kind: str, group: Mapping[str, Any], modules: Collection[str]
) -> dict[str, Any]:
    """The quantization_config of a checkpoint after more of its weights were packed: a table's or the MTP head's.

    A table is the embedding, lm_head or the draft head.

    Args:
        before: quantization_config before the packing; may be empty.
        kind: name of the group, which is in the names of its modules: `mtp` or the last part of a table's name.
        group: config group of the newly packed linears, from `config_group`.
        modules: names of the newly packed linears; no entry of `ignore` matches them afterwards.
    """
    before = before or settings_of({}, ())
    ours = "|".join(map(_pattern, group["targets"]))
    if kind == "mtp" and {module.split(".")[1] for module in modules} != {"fc", "layers"}:
        # The other linears of the head were packed before, perhaps in another way.
        group = {**group, "targets": list(modules)}
    others = before["config_groups"]
    # The first target that matches a linear counts, so our group comes first if a target of the base matches too.
    targets = [target for each in others.values() for target in each["targets"] if target != "Linear"]
    takes_ours = any(matches(target, module) for target in targets for module in modules)
    groups = {kind: dict(group), **others} if takes_ours else {**others, kind: dict(group)}
    if groups.keys() <= ADDED:
        # An engine looks up every linear, so those that no target matches are ignored. Not if linears of the layers are
        # packed: vLLM compares a pattern with the name of a fused linear before the names of its parts.
        patterns = [_pattern(target) for each in groups.values() for target in each["targets"]]
        ignore = [f"re:(?!{'|'.join(patterns)}).*"]
    else:
        entries = before.get("ignore") or []
        ignore = [kept for entry in entries if (kept := _without(entry, kind, modules, ours)) is not None]
    return {**before, "config_groups": groups, "ignore": ignore}


def _pattern(target: str) -> str:
    return target[3:] if target.startswith("re:") else f"{re.escape(target)}$"


def _without(entry: str, kind: str, modules: Collection[str], ours: str) -> str | None:
    """The entry of `ignore`, changed so that it matches none of these modules of a kind; None if nothing is left."""
    if not any(matches(entry, module) for module in modules):
        return entry
    if not entry.startswith("re:") or (kind in entry and "|" not in entry):
        return None
    return f"re:(?!{ours})(?:{entry.removeprefix('re:')})"
