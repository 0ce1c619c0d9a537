"""The stage `unpack`: writes quantised weights as the values that an engine computes with, in 16 bits.

Such a twin can be served and judged where vLLM has no kernel for the checkpoint itself, as on a CPU for most widths.
Kernels round an integer times its scale to 16 bits before they multiply, so the twin has the same values.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from slimqwen import checkpoint
from slimqwen.checkpoint import packing
from slimqwen.checkpoint.config import quantised, write_config
from slimqwen.checkpoint.files import carry_side_files
from slimqwen.checkpoint.tensors import NewTensor, rewrite
from slimqwen.checkpoint.weights import Weight, group_parts
from slimqwen.models.outline import Outline
from slimqwen.progress import Progress
from slimqwen.recipe.stage import Facts, Fault, Needs, Parameters, Stage, require_fit


def unpack_weights(source: Path, destination: Path, parameters: Parameters, progress: Progress) -> Facts:
    """Write source to destination without a quantised weight.

    Raises:
        StageError: nothing is quantised, or the scales of an 8-bit KV cache would lose their config.
        UnsupportedFormatError: a weight is quantised in a form that `Weight` does not read.
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
    config = quantised(outline.config, {})
    del config["quantization_config"]
    write_config(destination, config)
    return {"unpacked_weights": len(found)}


def _values(weight: Weight) -> Iterator[memoryview]:
    import torch

    for block in weight.blocks():
        yield memoryview(block.bfloat16().contiguous().view(torch.uint8).numpy()).cast("B")


def _quantised(outline: Outline) -> list[Weight]:
    weights = group_parts(outline.tensors, checkpoint.quantisation(outline.config)).values()
    return [weight for weight in weights if weight.is_quantised]


def inspect_unpacking(outline: Outline, parameters: Parameters) -> Iterator[Fault]:
    """Find faults: nothing is quantised, or the scales of an 8-bit KV cache would lose their config."""
    if not _quantised(outline):
        yield Fault(f"{outline.name} has no quantised weight; remove unpack from the recipe")
    if checkpoint.quantisation(outline.config).get("kv_cache_scheme"):
        yield Fault(
            f"{outline.name} has scales of an 8-bit KV cache, which a 16-bit checkpoint cannot have; remove unpack "
            "from the recipe"
        )


STAGE = Stage(
    name="unpack",
    parameters=Parameters,
    run=unpack_weights,
    needs=lambda outline, _: Needs(2 * outline.num_weights, 2**30, 20 * outline.num_weights),
    inspect=inspect_unpacking,
    last=True,
    changes=lambda _: tuple(map(packing.tensor_pattern, packing.LINEARS)),
)
