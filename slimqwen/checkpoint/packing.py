"""Finds linears and tables (embedding, lm_head) by kind, and packs them as compressed-tensors' integers."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from slimqwen.checkpoint.errors import CorruptCheckpointError
from slimqwen.checkpoint.tensors import NewTensor, SelectedRows, TensorInfo, from_ids, tensor_bytes
from slimqwen.formats.compressed_tensors import PackedIntegers, matches

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
    "embed_tokens": r"re:^(?!mtp\.).*embed_tokens$",
    "draft_head": r"re:.*draft_head$",
}
"""Kind of linears that can be packed -> the target of compressed-tensors that matches the names of their modules."""

IN_LAYER = re.compile(r"(?!mtp\.)(?:.*\.)?layers\.(\d+)\.(.+)\.weight")
"""Name of a weight of a decoder layer: number of the layer, module in it."""

TABLES = ("embed_tokens", "lm_head")
"""Kinds with a row for every token; a packed one is tied to no other."""

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
    """Select the unpacked linears of one kind from a checkpoint's tensors: name of the weight -> tensor.

    Args:
        stored: tensors of the checkpoint by name.
        kind: a key of `LINEARS`, such as "mlp".
    """
    return {name: info for name, info in stored.items() if is_linear(name, kind)}


def is_linear(name: str, kind: str) -> bool:
    """Whether a tensor is the unpacked weight of a linear of a kind (a key of `LINEARS`)."""
    return name.endswith(".weight") and matches(LINEARS[kind], name.removesuffix(".weight"))


def tensor_pattern(kind: str) -> str:
    """A regular expression for the tensors of one kind of linears, packed or not; `kind` is a key of `LINEARS`."""
    return rf"{LINEARS[kind].removeprefix('re:').removesuffix('$')}\."


def stored_bytes(layout: PackedIntegers, rows: int, columns: int) -> int:
    """Bytes of a packed weight of [rows, columns] with its scales and zero points."""
    return sum(tensor_bytes(dtypes[0], size) for size, dtypes in layout.parts(rows, columns).values())


def rounded_to_nearest(
    weight: TensorInfo | SelectedRows,
    name: str,
    bits: int,
    group_size: int | None,
    rounding: Rounding | None = None,
) -> dict[str, NewTensor]:
    """The packed tensors of a 16-bit weight, rounded to nearest in blocks of rows of a few MiB.

    Args:
        weight: floating point [rows, inputs].
        name: name of the weight in the new checkpoint, ending in `.weight`.
        group_size: number of neighbouring weights of a row that share a scale; None for one scale per row.
        rounding: another way to round, with the same scales.
    """
    group = group_size or weight.shape[1]

    def integers() -> Iterator[memoryview]:
        from compressed_tensors.compressors import pack_to_int32

        for quantised, _ in quantised_blocks(weight, group, bits, rounding):
            yield memoryview(pack_to_int32(quantised, bits).numpy()).cast("B")

    def scales() -> Iterator[memoryview]:
        import torch

        for _, block in quantised_blocks(weight, group, bits):
            yield memoryview(block.view(torch.uint8).numpy()).cast("B")

    chunks = {"weight_packed": integers, "weight_scale": scales}
    parts = PackedIntegers(bits, group_size).parts(*weight.shape)
    module = name.removesuffix(".weight")
    packed = {
        f"{module}.{part}": NewTensor(parts[part][1][0], parts[part][0], each)
        for part, each in chunks.items()
    }
    return packed | {f"{module}.weight_shape": from_ids(np.array(weight.shape))}


def quantised_blocks(
    weight: TensorInfo | SelectedRows, group_size: int, bits: int, rounding: Rounding | None = None
) -> Iterator[tuple[Any, Any]]:
    """Yield integers and scales of blocks of rows of a few MiB; rounded to nearest without `rounding`."""
    import torch

    from slimqwen.checkpoint.rtn import quantise

    rows, inputs = weight.shape
    step = max(1, (SEARCHED_BYTES if rounding else BLOCK_BYTES) // (2 * inputs))
    for first in range(0, rows, step):
        numbers = weight.rows(first, min(first + step, rows)).read().float()
        if not torch.isfinite(numbers).all():
            raise CorruptCheckpointError(
                f"{weight.file}: a weight to quantise, of {rows:,} rows and {inputs:,} columns, has NaN or infinity in "
                f"rows {first:,} to {first + len(numbers) - 1:,}",
                "download the checkpoint anew; of your own training, take one from before its weights diverged",
            )
        integers, scales = quantise(numbers, group_size, bits)
        yield (rounding(numbers, scales) if rounding else integers), scales
