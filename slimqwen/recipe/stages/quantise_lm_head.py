"""The stage `quantise_lm_head`: quantises the output head to 4 bits with a scale per group, on any checkpoint.

The other linears may be quantised already. Tied embeddings are untied: the input embedding stays as it is, and the
head becomes packed integers with a scale per group (compressed-tensors' pack-quantized format, which vLLM serves with
the same kernels as any W4A16 linear; the MTP head shares the packed head). Rows pass through in blocks.

GPTQ needs the inputs x of the head. vLLM reads text with the checkpoint in its present format, and of the hidden states
x only the sum of x x^T is kept.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from slimqwen import checkpoint
from slimqwen.checkpoint import packing
from slimqwen.checkpoint.config import quantised, untied, write_config
from slimqwen.checkpoint.files import carry_side_files
from slimqwen.checkpoint.tensors import NewTensor, TensorInfo, find_output_head, rewrite
from slimqwen.formats import find_format
from slimqwen.formats.compressed_tensors import config_group, with_group
from slimqwen.models.outline import Outline
from slimqwen.models.shape import Packing
from slimqwen.progress import Progress
from slimqwen.recipe.calibration_text import CalibrationText, calibration_documents, unread
from slimqwen.recipe.stage import (
    ENGINE_BYTES,
    TORCH_ENVIRONMENT,
    D,
    Facts,
    Fault,
    Needs,
    Parameters,
    Stage,
    StageError,
    require_fit,
)
from slimqwen.recipe.text_check import inspect_text

if TYPE_CHECKING:
    from torch import Tensor

_HEAD = "lm_head.weight"
_BITS = 4
_BATCH = 8
"""Number of sequences that the engine reads at a time."""

_IMPORTS_BYTES = 700 * 2**20
"""Resident memory of torch and compressed-tensors, bytes."""


class QuantiseLmHeadParameters(Parameters):
    """Parameters of the stage.

    Attributes:
        group_size: number of weights in a row that share a scale.
        rounding: nearest, or gptq, in which later columns compensate the error of earlier ones on the text.
        corpus: text for gptq; only the first `length` tokens of each document are read.
    """

    group_size: Literal[32, 64, 128] = 32
    rounding: Literal["nearest", "gptq"] = "nearest"
    corpus: CalibrationText = Field(default={})  # type: ignore[assignment]  # validated, as every default

    @field_validator("corpus", mode="before")
    @classmethod
    def _round_to_nearest_needs_no_text(cls, corpus: Any, info: ValidationInfo) -> Any:
        return unread(corpus) if info.data.get("rounding") == "nearest" else corpus


def quantise_output_head(
    source: Path, destination: Path, parameters: QuantiseLmHeadParameters, progress: Progress
) -> Facts:
    """Write source to destination with its output head packed.

    Raises:
        StageError: the checkpoint is quantised in another format than compressed-tensors, the head is packed already,
            its rows do not divide into groups, or GPTQ's error on the text is larger than that of RTN.
        CorpusError: the text is missing or malformed.
        CorruptCheckpointError: the head is not finite.
    """
    config = checkpoint.read_config(source)
    outline = Outline.read(source)
    require_fit(inspect_output_head(outline, parameters))
    [head] = find_output_head(outline.tensors)
    info = outline.tensors[head]
    rounding = None
    if parameters.rounding == "gptq":
        from slimqwen.models.gptq import GptqRounding

        rounding = GptqRounding(_second_moments(source, parameters, progress), parameters.group_size, _BITS)
    packed = packing.rounded_to_nearest(info, _HEAD, _BITS, parameters.group_size, rounding)

    def change(name: str, info: TensorInfo) -> Mapping[str, NewTensor] | None:
        if name != head:
            return None
        return packed if name == _HEAD else {name: info.unchanged(), **packed}

    rewrite(source, destination, change, progress)
    carry_side_files(source, destination)
    group = config_group(packing.LINEARS["lm_head"], _BITS, parameters.group_size)
    form = with_group(checkpoint.quantisation(config), "lm_head", group, ["lm_head"])
    write_config(destination, quantised(untied(config), form))
    facts: Facts = {
        "head_bytes_before": info.end - info.start,
        "head_bytes_after": sum(tensor.bytes for tensor in packed.values()),
    }
    if rounding:
        error, rounded_error = rounding.errors
        if error > rounded_error:
            raise StageError(
                f"GPTQ's error on the text is {error / rounded_error:.2f} times that of round-to-nearest; use more "
                "text, or set rounding: nearest"
            )
        facts |= {"head_error": error, "rounded_head_error": rounded_error}
    return facts


def _second_moments(source: Path, parameters: QuantiseLmHeadParameters, progress: Progress) -> "Tensor":
    """Sum of x x^T over the head's inputs x on the beginnings of documents: float32 [hidden, hidden]."""
    import torch
    from transformers import AutoTokenizer

    from slimqwen.serving.in_process import engine, read_head_inputs

    tokenizer = AutoTokenizer.from_pretrained(source)
    documents = calibration_documents(parameters.corpus, source)[: parameters.corpus.sequences]
    sequences = [
        tokenizer(document, add_special_tokens=False)["input_ids"][: parameters.corpus.length]
        for document in documents
    ]
    hidden = checkpoint.text_config(checkpoint.read_config(source))["hidden_size"]
    moments = torch.zeros(hidden, hidden, device="cuda" if torch.cuda.is_available() else "cpu")

    def add(states: "Tensor") -> None:
        moments.addmm_(states.float().T, states.float())

    with engine(source, max_model_len=parameters.corpus.length + 1, max_num_seqs=_BATCH) as llm:
        for first in range(0, len(sequences), _BATCH):
            progress("reading", first, len(sequences))
            read_head_inputs(llm, sequences[first : first + _BATCH], add)
    return moments.cpu()


def needs(outline: Outline, parameters: QuantiseLmHeadParameters) -> Needs:
    """Needs: disk for the packed head beside a tied embedding; memory for blocks of rows, or for GPTQ's engine."""
    hidden = outline.text["hidden_size"]
    head = outline.text["vocab_size"] * hidden
    memory = _IMPORTS_BYTES + 8 * packing.BLOCK_BYTES
    if parameters.rounding == "nearest":
        return Needs(outline.disk_bytes + head, memory, 20 * head)
    tokens = parameters.corpus.sequences * parameters.corpus.length
    operations = 2 * tokens * outline.num_weights + 6 * head * hidden
    memory = max(ENGINE_BYTES + outline.disk_bytes, memory + 8 * packing.SEARCHED_BYTES + 16 * hidden**2)
    return Needs(outline.disk_bytes + head, memory, operations, fixed_seconds=45)


def data(parameters: QuantiseLmHeadParameters) -> dict[str, str]:
    """Digest of the text; empty if it is not read."""
    return parameters.corpus.digests("corpus") if parameters.rounding == "gptq" else {}


def inspect_output_head(outline: Outline, parameters: QuantiseLmHeadParameters) -> Iterator[Fault]:
    """Find faults: a head that is packed already, rows that do not divide into groups, faults of the text."""
    if fault := find_format(checkpoint.quantisation(outline.config)).refused_addition():
        yield Fault(f"{outline.name} {fault}")
        return
    names = find_output_head(outline.tensors)
    if not names:
        yield Fault(f"{outline.name} has neither lm_head nor embed_tokens; choose a language model")
        return
    if len(names) > 1:
        yield Fault(f"{outline.name} has a packed lm_head already; remove quantise_lm_head from the recipe")
        return
    yield from inspect_table(outline, names[0], parameters.group_size)
    if parameters.rounding == "gptq":
        yield from inspect_text(
            outline, "corpus", parameters.corpus, least_documents=parameters.corpus.sequences
        )


def inspect_table(outline: Outline, name: str, group_size: int) -> Iterator[Fault]:
    """Find faults of a table (embedding, lm_head) to pack: packed already, or columns do not divide into groups."""
    info = outline.tensors[name]
    if info.dtype not in ("BF16", "F16", "F32"):
        yield Fault(f"{outline.name}: {name} is {info.dtype}; use a base that has it in 16 bits")
    if info.shape[1] % group_size:
        yield Fault(
            f"{outline.name}: group_size {group_size} does not divide the {info.shape[1]} columns of {name}; choose a "
            "smaller one",
            "group_size",
        )


def reshape(shape: D, parameters: QuantiseLmHeadParameters, /) -> D:
    """The dimensions with the output head packed and untied from the embedding."""
    return shape.with_packing({"lm_head": Packing(bits=_BITS, group_size=parameters.group_size)})


STAGE = Stage(
    name="quantise_lm_head",
    parameters=QuantiseLmHeadParameters,
    run=quantise_output_head,
    needs=needs,
    inspect=inspect_output_head,
    reshape=reshape,
    changes=lambda _: (re.escape(_HEAD),),
    data=data,
    own_tokens=lambda parameters: parameters.corpus.own_tokens if parameters.rounding == "gptq" else 0,
    environment=TORCH_ENVIRONMENT,
)
