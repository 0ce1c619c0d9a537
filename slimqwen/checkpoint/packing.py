"""Packed linears of a checkpoint, compressed-tensors' `pack-quantized`: which ones, how wide, and how to pack one."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimqwen.checkpoint.config import quantisation
from slimqwen.checkpoint.errors import CorruptCheckpointError, UnsupportedFormatError
from slimqwen.checkpoint.tensors import NewTensor, TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

LINEARS: Mapping[str, str] = {
    "mlp": r"re:^(?!mtp\.).*layers\.\d+\.mlp\.(gate|up|down)_proj$",
    # Not the router, nor the shared expert and its gate.
    "experts": r"re:^(?!mtp\.).*layers\.\d+\.mlp\.experts\.\d+\.(gate|up|down)_proj$",
    "attention": r"re:^(?!mtp\.).*layers\.\d+\.self_attn\.(q|k|v|o)_proj$",
    # Not in_proj_a and in_proj_b: they have one row per head, and they control the decay of the state.
    "linear_attention": r"re:^(?!mtp\.).*layers\.\d+\.linear_attn\.(in_proj_qkv|in_proj_z|out_proj)$",
    "mtp": r"re:^mtp\.(fc|layers\.\d+\.(mlp|self_attn)\.\w+_proj)$",
    "lm_head": r"re:.*lm_head$",
}
"""Kinds of linears that can be packed: the target of compressed-tensors that names their modules."""

PACKED = ".weight_packed"
"""End of the name of a packed weight."""

UNPACKED_MTP = "re:^mtp.*"
"""Entry of `ignore` where the MTP head is not packed; an engine builds the head from the same config."""

VISION_TOWER = "re:.*visual.*"
"""Entry of `ignore` in a multimodal checkpoint, whose vision tower is never packed."""

BLOCK_BYTES = 8 * 2**20
"""16-bit weights that are rounded to nearest at a time."""

SEARCHED_BYTES = 16 * BLOCK_BYTES
"""16-bit weights that another rounding gets at a time: GPTQ factorises the moments of the inputs for each block."""

Rounding = Callable[["Tensor", "Tensor"], "Tensor"]
"""(rows, float32 [rows, inputs]; scales, bfloat16 [rows, groups]) -> int8 [rows, inputs]."""


def linears(stored: Mapping[str, TensorInfo], kind: str) -> dict[str, TensorInfo]:
    """The unpacked weights of a kind of linears (a key of `LINEARS`) among the tensors of a checkpoint."""
    return {name: info for name, info in stored.items() if is_linear(name, kind)}


def is_linear(name: str, kind: str) -> bool:
    """Whether a tensor is the unpacked weight of a kind of linears (a key of `LINEARS`)."""
    return name.endswith(".weight") and means(LINEARS[kind], name.removesuffix(".weight"))


def tensor_pattern(kind: str) -> str:
    """A regular expression for the names of all tensors of a kind of linears, packed or not."""
    return rf"{LINEARS[kind].removeprefix('re:').removesuffix('$')}\."


def group_of(module: str, form: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The group of compressed-tensors' quantization_config that packs a linear: a target that names it goes first."""
    if any(means(entry, module) for entry in form.get("ignore") or ()):
        return None
    groups = [group for group in form.get("config_groups", {}).values() if group.get("weights")]
    groups.sort(key=lambda group: "Linear" in group["targets"])
    return next((group for group in groups if any(means(entry, module) for entry in group["targets"])), None)


def packed_bits(module: str, form: Mapping[str, Any]) -> int:
    """Bits of a packed weight, by its checkpoint's quantization_config.

    Raises:
        CorruptCheckpointError: no group has the module.
    """
    group = group_of(module, form)
    if group is None:
        raise CorruptCheckpointError(
            f"config.json: no group of quantization_config has {module}, whose weight is packed; make the checkpoint "
            "anew"
        )
    return int(group["weights"]["num_bits"])


def means(entry: str, module: str) -> bool:
    """Whether an entry of compressed-tensors' `targets` or `ignore` (a name, class or pattern) means a linear.

    The output head is no Linear to vLLM, which takes a name or a pattern for it.
    """
    if entry.startswith("re:"):
        return re.match(entry[3:], module) is not None
    return entry == module or (entry == "Linear" and module != "lm_head")


def config_group(kind: str, bits: int, group_size: int | None) -> dict[str, Any]:
    """A config group for one kind of linears (a key of `LINEARS`), symmetric; without a group size by row."""
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": "channel" if group_size is None else "group",
        "group_size": group_size,
        "dynamic": False,
    }
    return {"targets": [LINEARS[kind]], "weights": weights, "format": "pack-quantized"}


def require_extensible(folder: Path, config: Mapping[str, Any]) -> None:
    """Go on only if linears of a checkpoint can be packed beside what it has: vLLM reads one format a checkpoint.

    Raises:
        UnsupportedFormatError: it is quantised in another format than compressed-tensors.
    """
    method = quantisation(config).get("quant_method", "compressed-tensors")
    if method != "compressed-tensors":
        raise UnsupportedFormatError(
            f"{folder} is quantised in the format {method}, to which no packed linears can be added; take the 16-bit "
            "checkpoint or one in compressed-tensors as the base, or leave this stage out"
        )


def with_group(
    config: Mapping[str, Any], kind: str, group: Mapping[str, Any], modules: Collection[str]
) -> dict[str, Any]:
    """The quantization_config of a checkpoint whose `lm_head` or `mtp` linears have been packed too.

    Args:
        config: config.json before; it may have no quantization_config.
        group: config group of the packed linears, from `config_group`.
        modules: names of the packed linears: no entry of `ignore` may mean one of them any longer.
    """
    before = quantisation(config) or {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {},
        "ignore": [],
    }
    if kind == "mtp" and {module.split(".")[1] for module in modules} != {"fc", "layers"}:
        # The rest of the head was packed before, in another way perhaps.
        group = {**group, "targets": list(modules)}
    others = before["config_groups"]
    # The first target that names a linear counts: ours, where one of the base's would mean it too.
    targets = [target for each in others.values() for target in each["targets"] if target != "Linear"]
    takes_ours = any(means(target, module) for target in targets for module in modules)
    groups = {kind: dict(group), **others} if takes_ours else {**others, kind: dict(group)}
    if groups.keys() <= {"lm_head", "mtp"}:
        # An engine asks for every linear: whatever no target names is ignored. Not where a linear of the layers is
        # packed: vLLM takes a pattern that matches the name of a fused linear before the names of its parts.
        patterns = [target.removeprefix("re:") for each in groups.values() for target in each["targets"]]
        ignore = [f"re:(?!{'|'.join(patterns)}).*"]
    else:
        entries = before.get("ignore") or []
        ignore = [kept for entry in entries if (kept := _without(entry, kind, modules)) is not None]
    return {**before, "config_groups": groups, "ignore": ignore}


def _without(entry: str, kind: str, modules: Collection[str]) -> str | None:
    """An entry of `ignore` that no longer means any of these modules of a kind; None where nothing of it is left."""
    if not any(means(entry, module) for module in modules):
        return entry
    if not entry.startswith("re:") or (kind in entry and "|" not in entry):
        return None
    return f"re:(?!{LINEARS[kind].removeprefix('re:')})(?:{entry.removeprefix('re:')})"


def rounded_to_nearest(
    weight: TensorInfo, name: str, bits: int, group_size: int | None, rounding: Rounding | None = None
) -> dict[str, NewTensor]:
    """The packed form of a 16-bit weight rounded to nearest; rows pass through in blocks of some MiB.

    Args:
        weight: floating [rows, inputs].
        name: name of the weight in the new checkpoint, ending in `.weight`.
        group_size: weights of a row that share a scale; None for one scale per row.
        rounding: another rounding with the same scales.
    """
    rows, inputs = weight.shape
    group = group_size or inputs

    def integers() -> Iterator[memoryview]:
        from compressed_tensors.compressors import pack_to_int32

        for quantised, _ in quantised_blocks(weight, group, bits, rounding):
            yield memoryview(pack_to_int32(quantised, bits).numpy()).cast("B")

    def scales() -> Iterator[memoryview]:
        import torch

        for _, block in quantised_blocks(weight, group, bits):
            yield memoryview(block.view(torch.uint8).numpy()).cast("B")

    def shape() -> Iterator[bytes]:
        yield b"".join(dimension.to_bytes(8, "little") for dimension in weight.shape)

    return {
        f"{name}_packed": NewTensor("I32", (rows, inputs * bits // 32), integers),
        f"{name}_scale": NewTensor("BF16", (rows, inputs // group), scales),
        f"{name}_shape": NewTensor("I64", (2,), shape),
    }


def quantised_blocks(
    weight: TensorInfo, group_size: int, bits: int, rounding: Rounding | None = None
) -> Iterator[tuple[Any, Any]]:
    """Integers and scales of a weight's rows, some MiB of rows at a time; to nearest without another rounding."""
    import torch

    from slimqwen.checkpoint.rtn import quantise

    rows, inputs = weight.shape
    step = max(1, (SEARCHED_BYTES if rounding else BLOCK_BYTES) // (2 * inputs))
    for first in range(0, rows, step):
        numbers = weight.rows(first, min(first + step, rows)).read().float()
        if not torch.isfinite(numbers).all():
            raise CorruptCheckpointError(
                f"{weight.file}: a weight to pack has NaN or infinity; make that checkpoint anew"
            )
        integers, scales = quantise(numbers, group_size, bits)
        yield (rounding(numbers, scales) if rounding else integers), scales
