"""The stage `unpack`: write quantised weights as the values that an engine computes with, in 16 bits.

Such a twin can be served and judged where vLLM has no kernel for the checkpoint itself, as on a CPU for most widths.
Kernels round an integer times its scale to 16 bits before they multiply, so the twin has the same values.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from slimqwen import checkpoint
from slimqwen.checkpoint import packing
from slimqwen.checkpoint.config import unquantised, write_config
from slimqwen.checkpoint.files import carry_side_files
from slimqwen.checkpoint.tensors import NewTensor, rewrite
from slimqwen.checkpoint.weights import Weight, group_parts
from slimqwen.models.outline import Outline
from slimqwen.progress import Progress
from slimqwen.recipe.stage import D, Facts, Fault, Needs, Parameters, Stage, require_fit

_IMPORTS_BYTES = 700 * 2**20
"""Resident memory of torch and compressed-tensors, bytes."""


class UnpackParameters(Parameters):
    """The stage has no parameters."""


def unpack_weights(
    source: Path, destination: Path, parameters: UnpackParameters, progress: Progress
) -> Facts:
    """Write source to destination without a quantised weight.

    Raises:
        StageError: no weight is quantised, or the KV cache is.
        UnsupportedFormatError: a weight is in a layout that is not read here.
    """
    outline = Outline.read(source)
    require_fit(inspect_unpacking(outline, parameters))
    replaced: dict[str, Mapping[str, NewTensor]] = {}
    found = _quantised(outline)
    for weight in found:
        replaced |= {name: {} for name in weight.tensor_names}
        replaced[weight.tensor_names[0]] = {
            weight.name: NewTensor("BF16", weight.shape, partial(_values, weight))
        }
    rewrite(source, destination, lambda name, _: replaced.get(name), progress)
    carry_side_files(source, destination)
    write_config(destination, unquantised(outline.config))
    return {"unpacked_weights": len(found)}


def _values(weight: Weight) -> Iterator[memoryview]:
    import torch

    for block in weight.blocks():
        yield memoryview(block.bfloat16().contiguous().view(torch.uint8).numpy()).cast("B")


def _quantised(outline: Outline) -> list[Weight]:
    weights = group_parts(outline.tensors, checkpoint.quantisation(outline.config)).values()
    return [weight for weight in weights if weight.is_quantised]


def needs(outline: Outline, parameters: UnpackParameters) -> Needs:
    """Needs: disk for 16 bits a weight; memory for a block of rows."""
    return Needs(2 * outline.num_weights, _IMPORTS_BYTES + 16 * packing.BLOCK_BYTES, 20 * outline.num_weights)


def inspect_unpacking(outline: Outline, parameters: UnpackParameters) -> Iterator[Fault]:
    """Find faults: nothing is quantised, or the scales of an 8-bit KV cache would lose their config."""
    if not _quantised(outline):
        yield Fault(f"{outline.name} has no quantised weight; remove unpack from the recipe")
    if checkpoint.quantisation(outline.config).get("kv_cache_scheme"):
        yield Fault(f"{outline.name} has scales of an 8-bit KV cache, which only a quantised checkpoint has")


def reshape(shape: D, parameters: UnpackParameters, /) -> D:
    """The dimensions with every weight in 16 bits."""
    return shape.unpacked()


STAGE = Stage(
    name="unpack",
    parameters=UnpackParameters,
    run=unpack_weights,
    needs=needs,
    inspect=inspect_unpacking,
    reshape=reshape,
    changes=lambda _: tuple(map(packing.tensor_pattern, packing.LINEARS)),
)
