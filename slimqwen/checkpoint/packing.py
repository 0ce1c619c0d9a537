"""Packed linears in compressed-tensors' format `pack-quantized`: which are packed, in how many bits, and how."""

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
    # Neither the router nor the shared expert and its gate.
    "experts": r"re:^(?!mtp\.).*layers\.\d+\.mlp\.experts\.\d+\.(gate|up|down)_proj$",
    "attention": r"re:^(?!mtp\.).*layers\.\d+\.self_attn\.(q|k|v|o)_proj$",
    # Not in_proj_a and in_proj_b: they have one row per head, and they control the decay of the state.
    "linear_attention": r"re:^(?!mtp\.).*layers\.\d+\.linear_attn\.(in_proj_qkv|in_proj_z|out_proj)$",
    "mtp": r"re:^mtp\.(fc|layers\.\d+\.(mlp|self_attn)\.\w+_proj)$",
    "lm_head": r"re:.*lm_head$",
}
"""Kind of linears that can be packed -> the target of compressed-tensors that matches the names of their modules."""

PACKED = ".weight_packed"
"""End of the name of a packed weight."""

UNPACKED_MTP = "re:^mtp.*"
"""Entry of `ignore` for an MTP head that is not packed: an engine builds it from the same config as the layers."""

VISION_TOWER = "re:.*visual.*"
"""Entry of `ignore` for the vision tower of a multimodal checkpoint, which is never packed."""

BLOCK_BYTES = 8 * 2**20
"""Bytes of 16-bit weights that are rounded to nearest at a time."""

SEARCHED_BYTES = 16 * BLOCK_BYTES
"""Bytes of 16-bit weights that another rounding gets at a time; GPTQ factorises the inputs' moments for each block."""

Rounding = Callable[["Tensor", "Tensor"], "Tensor"]
"""A way to round: (weights, float32 [rows, inputs]; scales, bfloat16 [rows, groups]) -> int8 [rows, inputs]."""


def linears(stored: Mapping[str, TensorInfo], kind: str) -> dict[str, TensorInfo]:
    """The unpacked weights of the linears of a kind (a key of `LINEARS`) among the tensors of a checkpoint."""
    return {name: info for name, info in stored.items() if is_linear(name, kind)}


def is_linear(name: str, kind: str) -> bool:
    """Whether a tensor is the unpacked weight of a linear of a kind (a key of `LINEARS`)."""
    return name.endswith(".weight") and means(LINEARS[kind], name.removesuffix(".weight"))


def tensor_pattern(kind: str) -> str:
    """A regular expression that matches the names of all tensors, packed or not, of the linears of a kind."""
    return rf"{LINEARS[kind].removeprefix('re:').removesuffix('$')}\."


def group_of(module: str, form: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The group of compressed-tensors' quantization_config that packs a linear; None for an unpacked linear.

    A group whose target matches the linear's name takes precedence over one for the class `Linear`.
    """
    if any(means(entry, module) for entry in form.get("ignore") or ()):
        return None
    groups = [group for group in form.get("config_groups", {}).values() if group.get("weights")]
    groups.sort(key=lambda group: "Linear" in group["targets"])
    return next((group for group in groups if any(means(entry, module) for entry in group["targets"])), None)


def packed_bits(module: str, form: Mapping[str, Any]) -> int:
    """Bits of a packed weight, as quantization_config (`form`) says.

    Raises:
        CorruptCheckpointError: no group of the config has the module as a target.
    """
    group = group_of(module, form)
    if group is None:
        raise CorruptCheckpointError(
            f"config.json: no group of quantization_config has the target {module}, whose weight is packed"
        )
    return int(group["weights"]["num_bits"])


def means(entry: str, module: str) -> bool:
    """Whether an entry of compressed-tensors' `targets` or `ignore` (a name, class or pattern) matches a linear.

    The class `Linear` does not match the output head, as in vLLM; only its name or a pattern does.
    """
    if entry.startswith("re:"):
        return re.match(entry[3:], module) is not None
    return entry == module or (entry == "Linear" and module != "lm_head")


def config_group(kind: str, bits: int, group_size: int | None) -> dict[str, Any]:
    """A symmetric config group for the linears of a kind (a key of `LINEARS`); no `group_size` is a scale per row."""
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
    """Check that more linears of a checkpoint can be packed; vLLM reads only one format per checkpoint.

    Raises:
        UnsupportedFormatError: the checkpoint is quantised in another format than compressed-tensors.
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
    """The quantization_config of a checkpoint after more of its linears, of the kind `lm_head` or `mtp`, were packed.

    Args:
        config: config.json before the packing; it may have no quantization_config.
        group: config group of the newly packed linears, from `config_group`.
        modules: names of the newly packed linears; no entry of `ignore` matches them afterwards.
    """
    before = quantisation(config) or {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {},
        "ignore": [],
    }
    if kind == "mtp" and {module.split(".")[1] for module in modules} != {"fc", "layers"}:
        # The other linears of the head were packed before, perhaps in another way.
        group = {**group, "targets": list(modules)}
    others = before["config_groups"]
    # The first target that matches a linear counts, so our group comes first if a target of the base matches too.
    targets = [target for each in others.values() for target in each["targets"] if target != "Linear"]
    takes_ours = any(means(target, module) for target in targets for module in modules)
    groups = {kind: dict(group), **others} if takes_ours else {**others, kind: dict(group)}
    if groups.keys() <= {"lm_head", "mtp"}:
        # An engine looks up every linear, so those that no target matches are ignored. Not if linears of the layers are
        # packed: vLLM compares a pattern with the name of a fused linear before the names of its parts.
        patterns = [target.removeprefix("re:") for each in groups.values() for target in each["targets"]]
        ignore = [f"re:(?!{'|'.join(patterns)}).*"]
    else:
        entries = before.get("ignore") or []
        ignore = [kept for entry in entries if (kept := _without(entry, kind, modules)) is not None]
    return {**before, "config_groups": groups, "ignore": ignore}


def _without(entry: str, kind: str, modules: Collection[str]) -> str | None:
    """The entry of `ignore`, changed so that it matches none of these modules of a kind; None if nothing is left."""
    if not any(means(entry, module) for module in modules):
        return entry
    if not entry.startswith("re:") or (kind in entry and "|" not in entry):
        return None
    return f"re:(?!{LINEARS[kind].removeprefix('re:')})(?:{entry.removeprefix('re:')})"


def rounded_to_nearest(
    weight: TensorInfo, name: str, bits: int, group_size: int | None, rounding: Rounding | None = None
) -> dict[str, NewTensor]:
    """The packed tensors of a 16-bit weight, rounded to nearest in blocks of rows of a few MiB.

    Args:
        weight: floating point [rows, inputs].
        name: name of the weight in the new checkpoint, ending in `.weight`.
        group_size: number of neighbouring weights of a row that share a scale; None for one scale per row.
        rounding: another way to round, with the same scales.
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
    """Yield integers and scales of blocks of rows of a few MiB; rounded to nearest without `rounding`."""
    import torch

    from slimqwen.checkpoint.rtn import quantise

    rows, inputs = weight.shape
    step = max(1, (SEARCHED_BYTES if rounding else BLOCK_BYTES) // (2 * inputs))
    for first in range(0, rows, step):
        numbers = weight.rows(first, min(first + step, rows)).read().float()
        if not torch.isfinite(numbers).all():
            raise CorruptCheckpointError(f"{weight.file}: a weight to pack has NaN or infinity")
        integers, scales = quantise(numbers, group_size, bits)
        yield (rounding(numbers, scales) if rounding else integers), scales
