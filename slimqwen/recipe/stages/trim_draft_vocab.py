"""The stage `trim_draft_vocab`: restricts drafts of the MTP head to the tokens that the model itself uses most.

A draft pass reads the whole output head; with a large vocabulary, that is most of the bytes it reads. This stage copies
the rows of `size` ids into a separate draft head, in a file of its own (`slimqwen.checkpoint.draft_head`). The target
verifies with its whole vocabulary as before, so no response changes; where the target chooses a token without a row,
the draft is rejected. Ids are counted in the continuations that the stage `sample_outputs` wrote beside the checkpoint
(FR-Spec, arXiv 2502.14856, ranks the ids of a corpus the same way). Added tokens and ids that the settings name always
get a row.

The rows are those of the output head, in 16, 8 or 4 bits; a step reads them K times. In 16 bits, rows of a quantised
head are unpacked, so that vLLM computes the same scores as with that head. In 8 or 4 bits, rows of a head that is
packed so are copied bit for bit, and those of a 16-bit head are rounded to nearest. `sampled_outputs.jsonl` is passed
on, because the target's outputs stay the same. The file trim_draft_vocab.json beside the checkpoint states how much of
the held-out continuations the ids cover, for this size and others.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from slimqwen import checkpoint
from slimqwen.checkpoint import draft_head, packing
from slimqwen.checkpoint.config import quantisation, quantised, read_json_object, write_config
from slimqwen.checkpoint.files import carry_side_files
from slimqwen.checkpoint.tensors import (
    NewTensor,
    SelectedRows,
    TensorInfo,
    find_output_head,
    from_ids,
    from_torch,
    rewrite,
    selected_rows,
)
from slimqwen.checkpoint.weights import Weight, group_parts, read_weights
from slimqwen.formats import find_format
from slimqwen.formats.compressed_tensors import PackedIntegers, config_group, with_group
from slimqwen.models.outline import Outline
from slimqwen.models.shape import Packing
from slimqwen.models.vocabulary import Ids
from slimqwen.progress import Progress
from slimqwen.recipe.sampled_outputs import OUTPUTS, Output, read_outputs
from slimqwen.recipe.stage import D, Facts, Fault, Needs, Parameters, Stage, StageError, require_fit
from slimqwen.recipe.stages.prune_vocab import VocabularySize, named_ids, rows_of
from slimqwen.recipe.stages.quantise_lm_head import inspect_table

REPORT = "trim_draft_vocab.json"
"""File beside the checkpoint that states the coverage of the held-out continuations by size."""

_CARRIER = "mtp.norm.weight"
"""A tensor that every MTP head has, quantised or not."""

_SIXTEEN_BITS = ("BF16", "F16")
_OUTPUTS_BYTES = 32 * 2**20
"""Assumed size of `OUTPUTS`, bytes, if the file does not exist yet: some thousand continuations."""

_IMPORTS_BYTES = 700 * 2**20
"""Resident memory of torch and compressed-tensors, bytes."""


class TrimDraftVocabParameters(Parameters):
    """Parameters of the stage.

    Attributes:
        size: number of ids that may be drafted, or a share such as 25%; rounded up to a multiple of 64.
        bits: bits of a weight of the draft head; with 8, each row has a scale.
        group_size: number of weights in a row that share a scale, with 4 bits; that of the output head if it is packed.
    """

    size: Annotated[VocabularySize, Field(examples=["25%"])]
    bits: Literal[16, 8, 4] = 16
    group_size: Literal[32, 64, 128] = 32

    @property
    def packing(self) -> Packing | None:
        """How the draft head is packed; None in 16 bits."""
        if self.bits == 16:
            return None
        return Packing(bits=self.bits, group_size=self.group_size if self.bits == 4 else None)


def trim_draft_vocabulary(
    source: Path, destination: Path, parameters: TrimDraftVocabParameters, progress: Progress
) -> Facts:
    """Write source to destination with a draft head.

    Raises:
        CorpusError: source has no sampled_outputs.jsonl beside it.
        StageError: source has no MTP head or a draft head already, its output head cannot be unpacked to 16 bits, or
            `size` does not lie between the number of required ids and the size of the vocabulary.
    """
    progress("counting ids", 0, 0)
    config = checkpoint.read_config(source)
    require_fit(inspect_trimming(Outline.read(source), parameters))
    take_rows = _output_rows(source, parameters.packing)
    outputs = list(read_outputs(source))
    vocab_size: int = checkpoint.text_config(config)["vocab_size"]
    counts = _counts((output for output in outputs if not output.held_out), vocab_size)
    held_out = _counts((output for output in outputs if output.held_out), vocab_size)
    required = _required_ids(source, vocab_size)
    ranked = _ranked(counts, required)
    size = rows_of(parameters.size, vocab_size)
    if size < len(required):
        raise StageError(
            f"{source}: size {size} is less than the {len(required)} ids that are always kept; raise size"
        )
    ids = np.sort(ranked[:size])
    rows = take_rows(ids)

    def change(name: str, info: TensorInfo) -> Mapping[str, NewTensor] | None:
        if name != _CARRIER:
            return None
        return {name: info.unchanged(), **rows, draft_head.TOKEN_IDS: from_ids(ids)}

    rewrite(source, destination, change, progress)
    carry_side_files(source, destination)
    shutil.copyfile(source / OUTPUTS, destination / OUTPUTS)
    config = draft_head.announced(config, size)
    if packed := parameters.packing:
        group = config_group(packing.LINEARS["draft_head"], packed.bits, packed.group_size)
        form = with_group(quantisation(config), "draft_head", group, [draft_head.MODULE])
        config = quantised(config, form)
    write_config(destination, config)
    sizes = sorted({size, *(vocab_size // 2**power for power in range(5))} - {0}, reverse=True)
    covered = {rows: _share(held_out, ranked[: max(rows, len(required))]) for rows in sizes}
    report: dict[str, Any] = {
        "schema": "trim_draft_vocab/1",
        "parameters": parameters.model_dump(mode="json"),
        "rows": size,
        "head_bytes": sum(tensor.bytes for tensor in rows.values()),
        "vocab_size": vocab_size,
        "always_in": len(required),
        "counted_tokens": int(counts.sum()),
        "ids_counted": int(np.count_nonzero(counts)),
        "held_out_tokens": int(held_out.sum()),
        "coverage": covered[size],
        "coverage_by_rows": {str(rows): share for rows, share in covered.items()},
    }
    (destination / REPORT).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    facts = ("rows", "head_bytes", "vocab_size", "counted_tokens", "held_out_tokens", "coverage")
    return {name: report[name] for name in facts}


def needs(outline: Outline, parameters: TrimDraftVocabParameters) -> Needs:
    """Needs: disk for the input and the new rows; memory for libraries, outputs and the rows of a packed head."""
    head = 2 * outline.text["hidden_size"] * rows_of(parameters.size, outline.text["vocab_size"])
    outputs = outline.folder / OUTPUTS
    texts = outputs.stat().st_size if outputs.is_file() else _OUTPUTS_BYTES
    return Needs(outline.disk_bytes + head, _IMPORTS_BYTES + 10 * texts + 2 * head)


def inspect_trimming(outline: Outline, parameters: TrimDraftVocabParameters) -> Iterator[Fault]:
    """Find faults: no MTP head, a model for which vLLM supports no draft head, or a size that trims nothing."""
    if "num_experts" in outline.text:
        yield Fault(
            f"{outline.name} is a mixture of experts, whose MTP head vLLM builds from a class without a draft head; "
            "remove trim_draft_vocab from the recipe"
        )
    elif _CARRIER not in outline.tensors:
        yield Fault(
            f"{outline.name} has no {_CARRIER}: nothing drafts; remove trim_draft_vocab from the recipe"
        )
    elif draft_head.WEIGHT in outline.tensors:
        yield Fault(f"{outline.name} has a draft head already; remove one trim_draft_vocab from the recipe")
    rows = outline.text["vocab_size"]
    if (size := rows_of(parameters.size, rows)) >= rows:
        yield Fault(
            f"size {size} has to be less than {rows}, the whole vocabulary of {outline.name}; lower size",
            "size",
        )
    if parameters.packing:
        yield from _inspect_packing(outline, parameters.packing)


def _inspect_packing(outline: Outline, packed: Packing) -> Iterator[Fault]:
    """Find why no rows of the output head can be packed, or copied, in this way."""
    form = find_format(quantisation(outline.config))
    weights = group_parts(outline.tensors, form.settings)
    [head, *others] = find_output_head(weights) or [""]
    if not head or others:
        return  # a fault of any draft head, which the run names
    if not form.takes_more:
        yield Fault(
            f"{outline.name} is quantised in the format {form.method}, to which no packed draft head can be added; set "
            "bits to 16",
            "bits",
        )
    elif not weights[head].is_quantised:
        yield from inspect_table(outline, head, packed.group_size or 1)
    elif (layout := weights[head].layout) != packed.layout:
        same = ""
        if isinstance(layout, PackedIntegers) and layout.symmetric and layout.bits == 4:
            same = f"4 and group_size to {layout.group_size}, or bits to "
        yield Fault(
            f"{outline.name} has an output head that is not packed as the draft head is to be; set bits to {same}16",
            "bits",
        )


def _counts(outputs: Iterator[Output], vocab_size: int) -> Ids:
    """Number of occurrences of every id in continuations: [vocab_size]."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for output in outputs:
        counts += np.bincount(np.array(output.continuation, dtype=np.int64), minlength=vocab_size)
    return counts


def _required_ids(source: Path, vocab_size: int) -> Ids:
    """Ids of the added tokens and of those that the settings name, such as the ends of a text; ascending."""
    added = read_json_object(source / "tokenizer.json").get("added_tokens", [])
    ids = np.array(sorted({token["id"] for token in added} | named_ids(source)), dtype=np.int64)
    return ids[ids < vocab_size]  # a tokenizer may have more ids than the model has rows


def _ranked(counts: Ids, required: Ids) -> Ids:
    """Rank all ids: the required ones, then by occurrences; ties go to the smaller id, which BPE merged earlier."""
    order = np.argsort(-counts, kind="stable")
    return np.concatenate([required, order[~np.isin(order, required)]])


def rank_ids(source: Path) -> Ids:
    """Rank all ids of a checkpoint with sampled outputs: first the required ones, then by their use in the outputs."""
    vocab_size: int = checkpoint.text_config(checkpoint.read_config(source))["vocab_size"]
    counts = _counts((output for output in read_outputs(source) if not output.held_out), vocab_size)
    return _ranked(counts, _required_ids(source, vocab_size))


def _share(counts: Ids, ids: Ids) -> float:
    return round(float(counts[ids].sum() / counts.sum()), 6)


def _output_rows(source: Path, packed: Packing | None) -> Callable[[Ids], dict[str, NewTensor]]:
    """Return a function from ids to the tensors of a draft head with their rows of the output head.

    Args:
        packed: how the rows are packed; None in 16 bits.

    Raises:
        StageError: source has no output head.
        UnsupportedFormatError: the output head is in a format that cannot be unpacked.
    """
    weights = read_weights(source)
    heads = find_output_head(weights)
    if len(heads) != 1:
        raise StageError(
            f"{source} needs one output head, but stores {', '.join(heads) or 'none'}; use a language model with one"
        )
    head = weights[heads[0]]
    if packed and head.is_quantised:
        return lambda ids: _packed_rows(head, ids)
    if packed:
        bits, group_size = packed.bits, packed.group_size
        return lambda ids: packing.rounded_to_nearest(
            SelectedRows(head.carrier, ids), draft_head.WEIGHT, bits, group_size
        )
    if head.is_quantised:
        next(head.blocks())  # raises if it cannot be unpacked
    if head.carrier.dtype in _SIXTEEN_BITS:
        return lambda ids: {draft_head.WEIGHT: selected_rows(head.carrier, ids)}
    return lambda ids: {draft_head.WEIGHT: _unpacked_rows(head, ids)}


def _packed_rows(head: Weight, ids: Ids) -> dict[str, NewTensor]:
    """The rows of a packed head, bit for bit."""
    assert isinstance(head.layout, PackedIntegers)
    rows = {part: selected_rows(head.parts[part], ids) for part in head.layout.by_row}
    rows["weight_shape"] = from_ids(np.array([len(ids), head.shape[1]]))
    return {f"{draft_head.PREFIX}{part}": tensor for part, tensor in rows.items()}


def _unpacked_rows(head: Weight, ids: Ids) -> NewTensor:
    """Dequantised rows of a quantised head, in the dtype of its scales, as vLLM computes them."""
    dtypes = (info.dtype for info in head.parts.values())
    dtype = next((dtype for dtype in dtypes if dtype in _SIXTEEN_BITS), "BF16")

    def chunks() -> Iterator[bytes | memoryview]:
        first = 0
        for block in head.blocks():
            last = first + len(block)
            wanted = ids[np.searchsorted(ids, first) : np.searchsorted(ids, last)] - first
            if len(wanted):
                yield from from_torch(block[wanted], dtype).chunks()
            first = last

    return NewTensor(dtype, (len(ids), head.shape[1]), chunks)


def reshape(shape: D, parameters: TrimDraftVocabParameters, /) -> D:
    """The dimensions with a draft head added."""
    trimmed = shape.with_draft_vocabulary(rows_of(parameters.size, shape.text["vocab_size"]))
    return trimmed.with_packing({"draft_head": parameters.packing}) if parameters.packing else trimmed


STAGE = Stage(
    name="trim_draft_vocab",
    parameters=TrimDraftVocabParameters,
    run=trim_draft_vocabulary,
    needs=needs,
    inspect=inspect_trimming,
    summarise=lambda facts: (
        f"drafts come from {facts['rows']} of {facts['vocab_size']} ids, which cover {facts['coverage']:.1%} of the "
        "held-out continuations"
    ),
    reshape=reshape,
    follows=("sample_outputs",),
    changes=lambda _: (re.escape(draft_head.PREFIX),),
)
