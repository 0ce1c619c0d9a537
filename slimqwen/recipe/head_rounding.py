"""GPTQ of the MTP head in the stage `calibrate`: reads outputs that `sample_outputs` wrote, and estimates its cost."""

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from slimqwen.models.outline import Outline
from slimqwen.models.shape import Packing
from slimqwen.progress import Progress
from slimqwen.recipe.sampled_outputs import OUTPUTS, read_outputs
from slimqwen.recipe.stage import Facts, Fault, Needs

if TYPE_CHECKING:
    from slimqwen.models.gptq import GptqRounding

_TEXTS = 256
"""Sampled outputs on which the head drafts."""

_DEPTH = 4
"""Tokens that it drafts at a time (K)."""

_LONGEST = 1024
"""Assumed tokens of an output with its prompt, if `OUTPUTS` is from elsewhere."""


def round_head(
    source: Path, packed: Packing, folder: Path, progress: Progress
) -> Mapping[str, "GptqRounding"]:
    """Prepare GPTQ for each linear of the MTP head; returns the roundings by the name of the weight.

    Args:
        source: checkpoint with an MTP head, and with outputs by `sample_outputs` beside it.
        packed: bits and groups to round the head to.
        folder: folder in which a subfolder `head` is made for hidden states.

    Raises:
        CorpusError: source has no sampled_outputs.jsonl beside it.
    """
    from slimqwen.models.mtp_rounding import round_head

    sampled = (output for output in read_outputs(source) if not output.held_out)
    texts = [[*output.prompt, *output.continuation] for output in islice(sampled, _TEXTS)]
    long = [text for text in texts if len(text) > _DEPTH + 1]
    return round_head(source, long, _DEPTH, packed, folder / "head", progress)


def errors(rounded: Mapping[str, "GptqRounding"]) -> Facts:
    """Facts for the manifest after rounding: relative output errors of the linears by GPTQ and by round-to-nearest."""
    if not rounded:
        return {}
    found = [rounding.errors for rounding in rounded.values()]
    return {"head_errors": [each for each, _ in found], "rounded_head_errors": [each for _, each in found]}


def needs(outline: Outline, imports_bytes: int) -> Needs:
    """Estimate the needs of GPTQ of the MTP head.

    Disk holds the hidden states of the texts; memory holds embedding, output head, a layer and the second moments.

    Args:
        imports_bytes: memory that the imported libraries take, bytes.
    """
    hidden, inner, outputs = outline.text["hidden_size"], outline.text["intermediate_size"], outline.outputs
    tokens = _TEXTS * (outputs.prompt + outputs.continuation if outputs else _LONGEST)
    numbers = outline.num_table_weights + 2 * outline.num_layer_weights + 3 * (8 * hidden**2 + inner**2)
    operations = 2 * tokens * (outline.num_weights + _DEPTH * outline.num_weights_of("mtp"))
    disk_bytes = outline.disk_bytes + 2 * 4 * tokens * hidden
    return Needs(disk_bytes, imports_bytes + 4 * numbers, operations, fixed_seconds=25)


def inspect(outline: Outline) -> Iterator[Fault]:
    """Yield a fault if no stage before writes outputs for the head to draft on."""
    if not (outline.outputs or (outline.folder / OUTPUTS).is_file()):
        yield Fault(
            f"{outline.name} has no {OUTPUTS}, on which GPTQ measures the MTP head; put the stage sample_outputs "
            "before, or set rounding to nearest",
            "rounding",
        )
