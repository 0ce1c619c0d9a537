"""The stage `quantise_lm_head`: the output head in 4 bits, round-to-nearest (RTN) in groups, on any checkpoint.

The other linears may be quantised already. Tied embeddings are untied: the input embedding stays as it is, and the
head becomes packed integers with a scale per group (compressed-tensors' pack-quantized format, which vLLM serves with
the same kernels as any W4A16 linear; the MTP head shares the packed head). Rows pass through in blocks.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from slimqwen import checkpoint
from slimqwen.checkpoint import packing
from slimqwen.checkpoint.config import quantised, untied, write_config
from slimqwen.checkpoint.files import bytes_on_disk, carry_side_files
from slimqwen.checkpoint.tensors import NewTensor, TensorInfo, list_tensors, output_head, rewrite
from slimqwen.models.shape import Packing, Shape
from slimqwen.progress import Progress
from slimqwen.recipe.stage import Facts, Needs, Parameters, Stage, StageError

_HEAD = "lm_head.weight"
_BITS = 4
_IMPORTS_BYTES = 700 * 2**20
"""Resident size of torch and compressed-tensors."""


class QuantiseLmHeadParameters(Parameters):
    """Parameters of the stage.

    Attributes:
        group_size: weights of a row that share a scale.
    """

    group_size: Literal[32, 64, 128] = 32


def quantise_output_head(
    source: Path, destination: Path, parameters: QuantiseLmHeadParameters, progress: Progress
) -> Facts:
    """Write source to destination with its output head packed.

    Raises:
        UnsupportedFormatError: the checkpoint is quantised in another format than compressed-tensors.
        StageError: the head is packed already, or its rows do not divide into groups.
        CorruptCheckpointError: the head is not finite.
    """
    config = checkpoint.read_config(source)
    head, info = _checked_head(source, parameters)
    packed = packing.rounded_to_nearest(info, _HEAD, _BITS, parameters.group_size)

    def change(name: str, info: TensorInfo) -> Mapping[str, NewTensor] | None:
        if name != head:
            return None
        return packed if name == _HEAD else {name: info.unchanged(), **packed}

    rewrite(source, destination, change, progress)
    carry_side_files(source, destination)
    group = packing.config_group("lm_head", _BITS, parameters.group_size)
    form = packing.with_group(config, "lm_head", group, ["lm_head"])
    write_config(destination, quantised(untied(config), form))
    return {
        "head_bytes_before": info.end - info.start,
        "head_bytes_after": sum(tensor.bytes for tensor in packed.values()),
    }


def needs(source: Path, parameters: QuantiseLmHeadParameters) -> Needs:
    """Disk: a tied checkpoint grows by the packed head. Memory: some blocks of rows."""
    _, info = _checked_head(source, parameters)
    return Needs(bytes_on_disk(source) + info.elements, _IMPORTS_BYTES + 8 * packing.BLOCK_BYTES)


def _checked_head(source: Path, parameters: QuantiseLmHeadParameters) -> tuple[str, TensorInfo]:
    packing.require_extensible(source, checkpoint.read_config(source))
    if any(name.startswith("lm_head.") and name != _HEAD for name in list_tensors(source)):
        raise StageError(f"{source} has a packed lm_head already; take quantise_lm_head out of the recipe")
    name, info = output_head(source)
    if info.dtype not in ("BF16", "F16", "F32"):
        raise StageError(f"{source}: {name} is {info.dtype}; take a base with its output head in 16 bits")
    if info.shape[1] % parameters.group_size:
        raise StageError(
            f"{source}: group_size {parameters.group_size} does not divide the {info.shape[1]} inputs of {name}; "
            "choose a smaller one"
        )
    return name, info


def reshape(shape: Shape, parameters: QuantiseLmHeadParameters) -> Shape:
    """The output head packed, untied from the embedding."""
    return shape.with_packing({"lm_head": Packing(bits=_BITS, group_size=parameters.group_size)})


STAGE = Stage(
    name="quantise_lm_head",
    parameters=QuantiseLmHeadParameters,
    run=quantise_output_head,
    needs=needs,
    reshape=reshape,
    changes=lambda _: (re.escape(_HEAD),),
    code=("slimqwen.checkpoint.packing", "slimqwen.checkpoint.rtn", "slimqwen.checkpoint.tensors"),
    packages=("torch", "compressed-tensors"),
)
