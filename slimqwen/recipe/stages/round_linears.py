"""The stage `round_linears`: linears rounded to nearest (RTN), without calibration text.

The quick relative of `calibrate`, for checkpoints whose activations mean nothing (random weights) and as the baseline
of a search for better scales. Two schemes of compressed-tensors that vLLM serves on a CPU and on CUDA: W4A16, 4-bit
weights in groups along the inputs (pack-quantized), and W8A8, 8-bit weights with a scale per row and activations that
are rounded to 8 bits per token as they come (int-quantized). A tied output head is untied from the embedding.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from slimqwen import checkpoint
from slimqwen.checkpoint import packing
from slimqwen.checkpoint.config import untied, write_config
from slimqwen.checkpoint.files import bytes_on_disk, carry_side_files
from slimqwen.checkpoint.shape import Packing, Shape, ShapeError
from slimqwen.checkpoint.tensors import NewTensor, TensorInfo, list_tensors, output_head, rewrite
from slimqwen.progress import Progress
from slimqwen.recipe.stage import Facts, Needs, Parameters, Stage, StageError

_HEAD = "lm_head"
_LINEAR = re.compile(r"\.layers\.\d+\.\w+\.\w*proj\w*\.weight$")
_IMPORTS_BYTES = 700 * 2**20
"""Resident size of torch and compressed-tensors."""


class RoundLinearsParameters(Parameters):
    """Parameters of the stage.

    Attributes:
        scheme: W4A16 or W8A8.
        group_size: weights of a row that share a scale, for W4A16; W8A8 has one scale a row.
        targets: kinds of linears: those of all layers, the MTP head's own, the output head.
    """

    scheme: Literal["W4A16", "W8A8"] = "W4A16"
    group_size: Literal[32, 64, 128] = 32
    targets: Annotated[
        tuple[Literal["mlp", "attention", "linear_attention", "mtp", "lm_head"], ...], Field(min_length=1)
    ] = ("mlp",)


def run(source: Path, destination: Path, parameters: RoundLinearsParameters, progress: Progress) -> Facts:
    """Write source to destination with the targets rounded.

    Raises:
        StageError: a target is not BF16, is rounded already, or its inputs do not divide into groups.
        CorruptCheckpointError: a weight is not finite.
    """
    config = checkpoint.read_config(source)
    targets = _targets(source, parameters)

    def change(name: str, info: TensorInfo) -> Mapping[str, NewTensor] | None:
        if name not in targets:
            return None
        original = {} if name == targets[name] else {name: info.unchanged()}
        if parameters.scheme == "W4A16":
            return original | packing.rounded_to_nearest(info, targets[name], 4, parameters.group_size)
        return original | _eight_bits(targets[name], info)

    rewrite(source, destination, change, progress)
    carry_side_files(source, destination)
    others = [
        name.removesuffix(".weight")
        for name in list_tensors(source)
        if _LINEAR.search(name) and name not in targets and not name.startswith("mtp.")
    ]
    write_config(destination, _config(config, parameters, others))
    return {"rounded_linears": len(targets)}


def needs(source: Path, parameters: RoundLinearsParameters) -> Needs:
    """Disk: source, and a head that is untied. Memory: some blocks of rows."""
    _targets(source, parameters)
    head = output_head(source)[1].elements if _HEAD in parameters.targets else 0
    return Needs(bytes_on_disk(source) + head, _IMPORTS_BYTES + 8 * packing.BLOCK_BYTES)


def changes(parameters: RoundLinearsParameters) -> tuple[str, ...]:
    """Names of the linears that are rounded."""
    return tuple(map(packing.tensor_pattern, parameters.targets))


def _targets(source: Path, parameters: RoundLinearsParameters) -> dict[str, str]:
    """The weights to round: stored name -> new name, which differs for a tied output head."""
    config = checkpoint.read_config(source)
    if config.get("quantization_config"):
        raise StageError(f"{source} is quantised already; put round_linears first and list all targets in it")
    stored = list_tensors(source)
    kinds = [kind for kind in parameters.targets if kind != _HEAD]
    targets = {name: name for kind in kinds for name in packing.linears(stored, kind)}
    if _HEAD in parameters.targets:
        targets[output_head(source)[0]] = f"{_HEAD}.weight"
    if not targets:
        raise StageError(f"{source} has no {' or '.join(parameters.targets)} to round; choose other targets")
    for name in targets:
        info = stored[name]
        if info.dtype != "BF16":
            raise StageError(f"{source}: {name} is {info.dtype}; round_linears reads BF16, convert it first")
        if parameters.scheme == "W4A16" and info.shape[1] % parameters.group_size:
            raise StageError(
                f"{source}: group_size {parameters.group_size} does not divide the {info.shape[1]} inputs of {name}; "
                "choose a smaller one"
            )
    return targets


def _eight_bits(name: str, info: TensorInfo) -> dict[str, NewTensor]:
    """A weight in 8 bits, with a scale per row; rows pass through in blocks."""

    def integers() -> Iterator[memoryview]:
        for quantised, _ in packing.quantised_blocks(info, info.shape[1], 8):
            yield memoryview(quantised.numpy()).cast("B")

    scale = f"{name}_scale"
    packed = packing.rounded_to_nearest(info, name, 8, group_size=None)
    return {name: NewTensor("I8", info.shape, integers), scale: packed[scale]}


def _config(
    config: Mapping[str, Any], parameters: RoundLinearsParameters, others: Sequence[str]
) -> dict[str, Any]:
    """The config with a quantization_config for the targets, and an output head of its own where that is one.

    Linears of the layers that stay as they are (`others`) are ignored by name.
    """
    packed = parameters.scheme == "W4A16"
    group = packing.config_group("mlp", 4 if packed else 8, parameters.group_size if packed else None)
    group["targets"] = [packing.LINEARS[kind] for kind in parameters.targets]
    if not packed:
        group["format"] = "int-quantized"
        group["input_activations"] = {
            "num_bits": 8,
            "type": "int",
            "symmetric": True,
            "strategy": "token",
            "dynamic": True,
        }
    changed = {
        **config,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": group["format"],
            "quantization_status": "compressed",
            "config_groups": {"linears": group},
            # An engine asks for every linear, fused ones by the names of their parts.
            "ignore": [
                *others,
                *(() if "mtp" in parameters.targets else (packing.UNPACKED_MTP,)),
                *(() if _HEAD in parameters.targets else (_HEAD,)),
            ],
        },
    }
    return untied(changed) if _HEAD in parameters.targets else changed


def reshape(shape: Shape, parameters: RoundLinearsParameters) -> Shape:
    """The targets packed.

    Raises:
        ShapeError: the activations are rounded too.
    """
    if parameters.scheme != "W4A16":
        raise ShapeError("8-bit activations are not planned without weights; run the recipe first")
    form = Packing(bits=4, group_size=parameters.group_size)
    return shape.with_packing(dict.fromkeys(parameters.targets, form))


STAGE = Stage(
    name="round_linears",
    parameters=RoundLinearsParameters,
    run=run,
    needs=needs,
    reshape=reshape,
    changes=changes,
    code=("slimqwen.checkpoint.packing", "slimqwen.checkpoint.tensors", "slimqwen.checkpoint.rtn"),
    packages=("torch", "compressed-tensors"),
)
