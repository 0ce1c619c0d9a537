"""The stage `quantise_lm_head`: the output head in 4 bits, round-to-nearest (RTN) in groups, on any checkpoint.

The other linears may be quantised already. Tied embeddings are untied: the input embedding stays as it is, and the
head becomes packed integers with a scale per group (compressed-tensors' pack-quantized format, which vLLM serves with
the same kernels as any W4A16 linear; the MTP head shares the packed head). Rows pass through in blocks.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from slimqwen import checkpoint
from slimqwen.checkpoint import packing
from slimqwen.checkpoint.config import quantised, untied, write_config
from slimqwen.checkpoint.errors import UnsupportedFormatError
from slimqwen.checkpoint.files import carry_side_files
from slimqwen.checkpoint.tensors import NewTensor, TensorInfo, output_head, rewrite
from slimqwen.models.outline import Outline
from slimqwen.models.shape import Packing
from slimqwen.progress import Progress
from slimqwen.recipe.stage import D, Facts, Fault, Needs, Parameters, Stage, require_fit

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
        StageError: the checkpoint is quantised in another format than compressed-tensors, the head is packed already,
            or its rows do not divide into groups.
        CorruptCheckpointError: the head is not finite.
    """
    config = checkpoint.read_config(source)
    require_fit(inspect_output_head(Outline.read(source), parameters))
    head, info = output_head(source)
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


def needs(outline: Outline, parameters: QuantiseLmHeadParameters) -> Needs:
    """Disk: a tied checkpoint grows by the packed head. Memory: some blocks of rows."""
    head = outline.text["vocab_size"] * outline.text["hidden_size"]
    return Needs(outline.disk_bytes + head, _IMPORTS_BYTES + 8 * packing.BLOCK_BYTES, 20 * head)


def inspect_output_head(outline: Outline, parameters: QuantiseLmHeadParameters) -> Iterator[Fault]:
    """Find a head that is packed already, or whose rows do not divide into groups."""
    try:
        packing.require_extensible(outline.folder, outline.config)
    except UnsupportedFormatError as error:
        yield Fault(str(error))
        return
    if any(name.startswith("lm_head.") and name != _HEAD for name in outline.tensors):
        yield Fault(f"{outline.name} has a packed lm_head already; take quantise_lm_head out of the recipe")
        return
    tied = (name for name in outline.tensors if name.endswith("embed_tokens.weight"))
    name = _HEAD if _HEAD in outline.tensors else next(tied, None)
    if name is None:
        yield Fault(f"{outline.name} has neither lm_head nor embed_tokens; choose a language model")
        return
    info = outline.tensors[name]
    if info.dtype not in ("BF16", "F16", "F32"):
        yield Fault(f"{outline.name}: {name} is {info.dtype}; take a base with its output head in 16 bits")
    if info.shape[1] % parameters.group_size:
        yield Fault(
            f"{outline.name}: group_size {parameters.group_size} does not divide the {info.shape[1]} inputs of {name}; "
            "choose a smaller one",
            "group_size",
        )


def reshape(shape: D, parameters: QuantiseLmHeadParameters, /) -> D:
    """The output head packed, untied from the embedding."""
    return shape.with_packing({"lm_head": Packing(bits=_BITS, group_size=parameters.group_size)})


STAGE = Stage(
    name="quantise_lm_head",
    parameters=QuantiseLmHeadParameters,
    run=quantise_output_head,
    needs=needs,
    inspect=inspect_output_head,
    reshape=reshape,
    changes=lambda _: (re.escape(_HEAD),),
    code=("slimqwen.checkpoint.packing", "slimqwen.checkpoint.rtn", "slimqwen.checkpoint.tensors"),
    packages=("torch", "compressed-tensors"),
)
