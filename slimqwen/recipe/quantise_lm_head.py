"""The stage `quantise_lm_head`: the output head in 4 bits, rounded to nearest in groups, on any checkpoint.

Works on a checkpoint whose linears are quantised already, too. Tied embeddings are untied: the input embedding stays
as it is, and the head becomes packed integers with a scale a group (compressed-tensors' pack-quantized format, which
vLLM serves by the same kernels as any W4A16 linear; the MTP head shares the packed one). Rows pass through in blocks.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from slimqwen import checkpoint
from slimqwen.checkpoint import NewTensor, TensorInfo
from slimqwen.errors import SlimqwenError
from slimqwen.progress import Progress
from slimqwen.recipe.stage import Facts, Needs, Parameters, Stage

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int8]

_HEAD = "lm_head.weight"
_LEVELS = 7.5
"""Half of the width of 4 bits: what the largest weight of a group is scaled to, as compressed-tensors does it."""

_BLOCK = 8 * 2**20
_IMPORTS_BYTES = 200 * 2**20


class WrongHeadError(SlimqwenError):
    """The checkpoint has no 16-bit output head that this stage can pack."""


class QuantiseLmHeadParameters(Parameters):
    """What a recipe may say of this stage.

    Attributes:
        group_size: weights of a row that share a scale.
    """

    group_size: Literal[32, 64, 128] = 32


def run(source: Path, destination: Path, parameters: QuantiseLmHeadParameters, progress: Progress) -> Facts:
    """Write source to destination with its output head packed.

    Raises:
        WrongHeadError: the head is packed already, is not bfloat16, has NaN, or its rows do not divide into groups.
    """
    config = checkpoint.read_config(source)
    table = _table(source, parameters)
    packed = _packed(checkpoint.tensors(source)[table], parameters.group_size)

    def change(name: str, info: TensorInfo) -> Mapping[str, NewTensor] | None:
        if name != table:
            return None
        return packed if name == _HEAD else {name: info.kept(), **packed}

    checkpoint.rewrite(source, destination, change, progress)
    checkpoint.carry_side_files(source, destination)
    checkpoint.write_config(destination, _described(config, parameters.group_size))
    before = checkpoint.tensors(source)[table].elements * 2
    return {"head_bytes_before": before, "head_bytes_after": sum(tensor.bytes for tensor in packed.values())}


def needs(source: Path, parameters: QuantiseLmHeadParameters) -> Needs:
    """A tied checkpoint grows by the packed head; memory for some blocks of rows."""
    info = checkpoint.tensors(source)[_table(source, parameters)]
    return Needs(
        disk_bytes=checkpoint.bytes_on_disk(source) + info.elements,
        memory_bytes=_IMPORTS_BYTES + 8 * _BLOCK,
    )


def round_groups(rows: Floats, group_size: int) -> tuple[Integers, npt.NDArray[np.uint16]]:
    """Round to the nearest of 16 levels, symmetric, a scale a group.

    Args:
        rows: [rows, inputs].
        group_size: inputs that share a scale.

    Returns:
        [rows, inputs], integers from -8 to 7, and [rows, inputs / group_size], scales as the bits of a bfloat16.
    """
    groups = rows.reshape(len(rows), -1, group_size)
    # Rounded first, so that the integers are chosen for the very scale that is stored.
    scales = _to_bfloat16(np.abs(groups).max(axis=2) / _LEVELS)
    divisors = _from_bfloat16(scales)[:, :, None]
    whole = np.divide(groups, divisors, out=np.zeros_like(groups), where=divisors > 0)
    return np.rint(whole).clip(-8, 7).astype(np.int8).reshape(rows.shape), scales


def _table(source: Path, parameters: QuantiseLmHeadParameters) -> str:
    """The tensor that is the head: lm_head.weight, or with tied embeddings the input embedding."""
    stored = checkpoint.tensors(source)
    if any(name.startswith(f"{_HEAD}_") for name in stored):
        raise WrongHeadError(
            f"{source} has a packed lm_head already; take quantise_lm_head out of the recipe"
        )
    embeddings = [
        name for name in stored if name.endswith("embed_tokens.weight") and not name.startswith("mtp.")
    ]
    candidates = [_HEAD] if _HEAD in stored else embeddings
    if len(candidates) != 1:
        raise WrongHeadError(f"{source} has neither lm_head nor embed_tokens; choose a language model")
    info = stored[candidates[0]]
    if info.dtype != "BF16":
        raise WrongHeadError(
            f"{source}: {candidates[0]} is {info.dtype}; quantise_lm_head reads BF16, convert it first"
        )
    if info.shape[1] % parameters.group_size:
        raise WrongHeadError(
            f"{source}: group_size {parameters.group_size} does not divide the {info.shape[1]} inputs of "
            f"{candidates[0]}; choose a smaller one"
        )
    return candidates[0]


def _packed(table: TensorInfo, group_size: int) -> dict[str, NewTensor]:
    rows, inputs = table.shape

    def integers() -> Iterator[memoryview]:
        for block in _blocks(table):
            whole, _ = round_groups(block, group_size)
            nibbles = (whole.astype(np.int32) + 8).astype(np.uint32).reshape(len(block), -1, 8)
            words = np.zeros(nibbles.shape[:2], dtype="<u4")
            for place in range(8):
                words |= nibbles[:, :, place] << np.uint32(4 * place)
            yield words.data.cast("B")

    def scales() -> Iterator[memoryview]:
        for block in _blocks(table):
            yield np.ascontiguousarray(round_groups(block, group_size)[1]).data.cast("B")

    def shape() -> Iterator[bytes]:
        yield np.array(table.shape, dtype="<i8").tobytes()

    return {
        f"{_HEAD}_packed": NewTensor("I32", (rows, inputs // 8), integers),
        f"{_HEAD}_scale": NewTensor("BF16", (rows, inputs // group_size), scales),
        f"{_HEAD}_shape": NewTensor("I64", (2,), shape),
    }


def _blocks(table: TensorInfo) -> Iterator[Floats]:
    """The rows as float32, some megabytes at a time."""
    rows, inputs = table.shape
    step = max(1, _BLOCK // (2 * inputs))
    for first in range(0, rows, step):
        last = min(first + step, rows)
        read = b"".join(table.chunks(2 * inputs * first, 2 * inputs * last))
        block = _from_bfloat16(np.frombuffer(read, "<u2").reshape(-1, inputs))
        if not np.isfinite(block).all():
            raise WrongHeadError(
                f"{table.file}: the output head has NaN or infinity; make that checkpoint anew"
            )
        yield block


def _described(config: Mapping[str, Any], group_size: int) -> dict[str, Any]:
    """The config, its embeddings untied, its quantization_config with a group for the head."""
    described = {**config, "tie_word_embeddings": False}
    if "text_config" in config:
        described["text_config"] = {**config["text_config"], "tie_word_embeddings": False}
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": group_size,
        "dynamic": False,
    }
    group = {"targets": ["re:.*lm_head$"], "weights": weights, "format": "pack-quantized"}
    given = config.get("quantization_config")
    if given is None:
        quantization: dict[str, Any] = {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {},
            "ignore": ["re:(?!.*lm_head$).*"],
        }
    else:
        quantization = {**given, "ignore": [name for name in given.get("ignore", []) if name != "lm_head"]}
    quantization["config_groups"] = {**quantization["config_groups"], "lm_head": group}
    described["quantization_config"] = quantization
    return described


def _from_bfloat16(bits: npt.NDArray[np.uint16]) -> Floats:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _to_bfloat16(values: Floats) -> npt.NDArray[np.uint16]:
    """The nearest bfloat16, ties to even, as its bits; finite values only."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


STAGE = Stage(
    name="quantise_lm_head",
    parameters=QuantiseLmHeadParameters,
    run=run,
    needs=needs,
    code=("slimqwen.checkpoint",),
    packages=("numpy",),
)
