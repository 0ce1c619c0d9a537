"""The weights of a checkpoint as plain tensors, whatever quantisation format stores them.

Read are compressed-tensors (packed integers, int8, FP8), official FP8 blocks, GPTQ, AutoRound and AWQ.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from slimqwen.checkpoint.config import read_config
from slimqwen.checkpoint.errors import CorruptCheckpointError
from slimqwen.checkpoint.tensors import TensorInfo, list_tensors

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""AWQ interleaves the outputs of a word: the position of each in it."""

_SCALES = {"weight_scale", "weight_scale_inv"}
_QUANTISED_PARTS = {
    *("weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale"),
    *("qweight", "qzeros", "scales", "g_idx", *_SCALES),
}

Parts = Mapping[str, Tensor]
"""Tensors of one linear, by the last part of their names."""


def plain_weights(folder: Path) -> dict[str, Callable[[], Tensor]]:
    """A function that reads each tensor, by the name that the tensor has where nothing is quantised.

    A quantised weight is read as float32 [rows, columns], any other tensor as it is stored.

    Raises:
        CorruptCheckpointError: a weight is quantised in a format that is not read here.
    """
    quantisation = read_config(folder).get("quantization_config") or {}
    modules: dict[str, dict[str, TensorInfo]] = {}
    for name, info in list_tensors(folder).items():
        module, _, part = name.rpartition(".")
        modules.setdefault(module, {})[part] = info
    return dict(
        chain.from_iterable(_readers(module, parts, quantisation) for module, parts in modules.items())
    )


def _readers(
    module: str, stored: Mapping[str, TensorInfo], quantisation: Mapping[str, Any]
) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    def name(part: str) -> str:
        return f"{module}.{part}" if module else part

    def read(part: str) -> Tensor:
        with safe_open(stored[part].file, framework="pt") as opened:
            return opened.get_tensor(name(part))

    decode = _decoder(module, stored, quantisation)
    of_weight = set() if decode is None else stored.keys() & {"weight", *_QUANTISED_PARTS}
    if decode is not None:
        yield name("weight"), lambda: decode({part: read(part) for part in of_weight})
    for part in stored.keys() - of_weight:
        yield name(part), partial(read, part)


def _decoder(
    module: str, stored: Mapping[str, TensorInfo], quantisation: Mapping[str, Any]
) -> Callable[[Parts], Tensor] | None:
    """What makes the weight of its parts; None where it is stored as it is."""
    parts, method = stored.keys(), quantisation.get("quant_method")
    if parts >= {"weight_packed", "weight_scale", "weight_shape"}:
        return _decode_packed
    if parts >= {"qweight", "qzeros", "scales"}:
        if method == "awq" or "awq" in quantisation.get("packing_format", ""):
            return _decode_awq
        less_one = quantisation.get("checkpoint_format") != "gptq_v2"
        return lambda parts: _decode_gptq(parts, quantisation["bits"], less_one)
    dtype = stored["weight"].dtype if "weight" in stored else None
    if dtype in ("I8", "F8_E4M3") and parts & _SCALES:
        return lambda parts: _decode_scaled(parts, quantisation.get("weight_block_size"))
    if parts & _QUANTISED_PARTS or dtype not in (None, "F32", "F16", "BF16"):
        raise CorruptCheckpointError(
            f"{module} is stored as {', '.join(sorted(parts))} ({method or 'without quantization_config'}), which "
            "cannot be read here; choose a checkpoint in 16 bits or another format"
        )
    return None


def _decode_packed(parts: Parts) -> Tensor:
    """compressed-tensors' pack-quantized."""
    from compressed_tensors.compressors import unpack_from_int32

    words, scales = parts["weight_packed"], parts["weight_scale"].float()
    rows, columns = parts["weight_shape"].tolist()
    bits = 32 * words.shape[1] // columns
    groups = parts.get("weight_g_idx", torch.arange(columns) // (columns // scales.shape[1])).long()
    levels = unpack_from_int32(words, bits, torch.Size((rows, columns))).float()
    if (zero_points := parts.get("weight_zero_point")) is not None:
        levels -= unpack_from_int32(zero_points, bits, scales.shape, packed_dim=0).float()[:, groups]
    return levels * scales[:, groups]


def _decode_scaled(parts: Parts, block: tuple[int, int] | None) -> Tensor:
    """int8 or FP8 with a scale for the whole, for each row, each group of a row or each block."""
    weight = parts["weight"].float()
    scales = next(parts[part] for part in parts if part in _SCALES).float()
    if scales.dim() < 2:
        return weight * scales.reshape(-1, 1)
    for dimension, (length, count) in enumerate(zip(weight.shape, scales.shape, strict=True)):
        size = block[dimension] if block else -(-length // count)
        scales = scales.repeat_interleave(size, dimension).narrow(dimension, 0, length)
    return weight * scales


def _decode_gptq(parts: Parts, bits: int, less_one: bool) -> Tensor:
    """GPTQ: inputs of a word lie below one another; zero points are stored less one."""
    groups, scales = parts["g_idx"].long(), parts["scales"].float()
    levels = _integers(parts["qweight"], bits).movedim(-1, 1).flatten(0, 1)
    zeros = _integers(parts["qzeros"], bits).flatten(1) + less_one
    return ((levels - zeros[groups]) * scales[groups]).T


def _decode_awq(parts: Parts) -> Tensor:
    """AWQ's gemm layout, 4 bits: outputs of a word are interleaved."""
    levels, zeros = (_integers(parts[name], 4)[..., _AWQ_ORDER].flatten(1) for name in ("qweight", "qzeros"))
    groups = torch.arange(len(levels)) // (len(levels) // len(zeros))
    return ((levels - zeros[groups]) * parts["scales"].float()[groups]).T


def _integers(words: Tensor, bits: int) -> Tensor:
    """int32 [...] as the unsigned integers in it, the lowest bits first: int64 [..., 32 / bits]."""
    return (words.long()[..., None] >> torch.arange(0, 32, bits)) & (2**bits - 1)
