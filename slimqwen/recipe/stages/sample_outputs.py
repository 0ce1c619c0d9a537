"""The stage `sample_outputs`: samples the checkpoint's own outputs, as training text for its MTP head.

The head has to predict the target's tokens, so it learns from them: in vLLM the target, quantised and pruned as it will
be served, continues the beginnings of documents (self-distillation as in FastMTP, arXiv 2509.18362). The checkpoint
passes through unchanged, with `sampled_outputs.jsonl` beside it; of later stages only `trim_draft_vocab` and
`redistill_mtp` pass that file on, since they leave the target as it is.

Speculation is off, the chunks of requests are fixed and every request has its own seed, so the same inputs give the
same tokens.
"""

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from slimqwen.checkpoint.files import carry_all
from slimqwen.models.outline import Outline, SampledTexts
from slimqwen.progress import Progress
from slimqwen.recipe.own_prompts import OwnPrompts, seeds_digest
from slimqwen.recipe.sampled_outputs import OUTPUTS
from slimqwen.recipe.stage import TORCH_ENVIRONMENT, D, Facts, Fault, Needs, Parameters, Stage
from slimqwen.recipe.text_check import inspect_text
from slimqwen.text.chats import ChatRenderer, require_text_or_chat
from slimqwen.text.corpus import TextSource
from slimqwen.text.documents import read_documents
from slimqwen.text.files import CorpusError


class Prompts(TextSource):
    """The text whose beginnings the target continues; of the model's own text the prompts alone (`OwnPrompts`).

    The beginning is the whole of a {"prompt": …}, the first third of a text, or a chat up to its last response.

    Attributes:
        longest: largest number of prompt tokens; longer prompts are cut at the end.
    """

    longest: Annotated[int, Field(ge=4)] = 128
    seed: int = 1


class SampleOutputsParameters(Parameters):
    """Parameters of the stage.

    Attributes:
        prompts: text to continue.
        texts: number of sampled continuations to train on.
        held_out: number of greedy continuations of other prompts, to measure on.
        tokens: largest number of tokens of a continuation.
        temperature: sampling temperature of the continuations to train on.
        chunk: number of requests that the engine gets together.
        threads: CPU threads; a parameter because it affects the order of summation.
    """

    prompts: Prompts = Field(default={})  # type: ignore[assignment]  # validated, as every default
    texts: Annotated[int, Field(ge=16)] = 1024
    held_out: Annotated[int, Field(ge=8)] = 96
    tokens: Annotated[int, Field(ge=16)] = 96
    temperature: Annotated[float, Field(gt=0, le=2)] = 0.7
    chunk: Annotated[int, Field(ge=1)] = 64
    threads: Annotated[int, Field(ge=1)] = 2


def write_sampled_outputs(
    source: Path, destination: Path, parameters: SampleOutputsParameters, progress: Progress
) -> Facts:
    """Copy source to destination and write the outputs into sampled_outputs.jsonl there.

    Raises:
        CorpusError: the text of the prompts is missing, malformed or too short.
    """
    # torch reads the variable at import; without it vLLM uses a single thread.
    os.environ["OMP_NUM_THREADS"] = str(parameters.threads)
    from transformers import AutoTokenizer
    from vllm import SamplingParams

    from slimqwen.serving.in_process import engine

    progress("loading", 0, 0)
    tokenizer = AutoTokenizer.from_pretrained(source)
    total = parameters.texts + parameters.held_out
    own = None
    if parameters.prompts.is_own:
        own = OwnPrompts(source, tokenizer, parameters.prompts.seed, parameters.prompts.longest)
    prompts = [] if own else list(itertools.islice(_prompts(parameters.prompts, source, tokenizer), total))
    if not own and len(prompts) < total:
        raise CorpusError(
            f"{parameters.prompts.path} gives {len(prompts)} different prompts, but {total} are needed; add text, "
            "or lower texts or held_out"
        )
    carry_all(source, destination, leave_out=[OUTPUTS])
    num_tokens = 0
    longest = parameters.prompts.longest + parameters.tokens + 1
    with (
        engine(source, max_model_len=longest, max_num_seqs=parameters.chunk) as llm,
        (destination / OUTPUTS).open("w", encoding="utf-8") as lines,
    ):
        for first in range(0, total, parameters.chunk):
            progress("sampling", first, total)
            size = min(parameters.chunk, total - first)
            chunk = own.write(llm, first, size) if own else prompts[first : first + size]
            settings = [
                SamplingParams(
                    max_tokens=parameters.tokens,
                    temperature=0.0 if number < parameters.held_out else parameters.temperature,
                    seed=parameters.prompts.seed * 1_000_003 + number,
                )
                for number in range(first, first + len(chunk))
            ]
            answers = llm.generate([{"prompt_token_ids": ids} for ids in chunk], settings, use_tqdm=False)
            for number, answer in enumerate(answers, start=first):
                continuation = list(answer.outputs[0].token_ids)
                row = {
                    "prompt": chunk[number - first],
                    "continuation": continuation,
                    "held_out": number < parameters.held_out,
                }
                lines.write(json.dumps(row) + "\n")
                num_tokens += len(continuation)
    return {"continuations": total, "tokens": num_tokens}


def needs(outline: Outline, parameters: SampleOutputsParameters) -> Needs:
    """Needs: disk for a copy of the checkpoint and the texts; memory for the engine with its weights."""
    tokens = (parameters.texts + parameters.held_out) * (parameters.prompts.longest + parameters.tokens)
    steps = (parameters.texts + parameters.held_out) / parameters.chunk * parameters.tokens
    return Needs.of_engine(outline, tokens, 16, steps)


def inspect_prompts(outline: Outline, parameters: SampleOutputsParameters) -> Iterator[Fault]:
    """Find faults: too few or unreadable prompts, and prompts with continuations longer than the model's context."""
    longest = parameters.prompts.longest + parameters.tokens + 1
    if longest > (context := outline.text.get("max_position_embeddings", longest)):
        yield Fault(
            f"{longest} tokens exceed the context of {outline.name}, {context}; lower tokens or prompts.longest",
            "tokens",
        )
    total = parameters.texts + parameters.held_out
    yield from inspect_text(outline, "prompts", parameters.prompts, least_documents=total, or_prompt=True)


def reshape(shape: D, parameters: SampleOutputsParameters) -> D:
    """The dimensions of the output: those of the input, with the texts beside it."""
    sizes = parameters.texts, parameters.held_out, parameters.prompts.longest, parameters.tokens
    return shape.with_outputs(SampledTexts(*sizes))


def data(parameters: SampleOutputsParameters) -> dict[str, str]:
    """Digest of the text of the prompts; for text that the model itself writes, of the seeds file."""
    own = parameters.prompts.is_own
    return {"seeds": seeds_digest()} if own else parameters.prompts.digests("prompts")


def _prompts(prompts: Prompts, source: Path, tokenizer: Any) -> Iterator[list[int]]:
    """Yield beginnings of documents as token ids; no two are equal."""
    seen: set[tuple[int, ...]] = set()
    for beginning, is_whole in _beginnings(prompts, source):
        ids = tokenizer(beginning, add_special_tokens=False)["input_ids"]
        if is_whole:
            ids = ids[: max(4, len(ids) // 3)]
        ids = ids[: prompts.longest]
        if len(ids) >= 4 and tuple(ids) not in seen:
            seen.add(tuple(ids))
            yield ids


def _beginnings(prompts: Prompts, source: Path) -> Iterator[tuple[str, bool]]:
    """Yield pairs of a text and whether it is a whole document, which has yet to be cut to its beginning."""
    chats = None
    for document in read_documents(prompts.path):
        if document.is_blank:
            continue
        require_text_or_chat(document, or_prompt=True)
        if document.prompt is not None:
            yield document.prompt, False
        elif document.text is not None:
            yield document.text, True
        else:
            chats = chats or ChatRenderer(source)
            yield chats.text_of(document, to_continue=True), False


STAGE = Stage(
    name="sample_outputs",
    parameters=SampleOutputsParameters,
    run=write_sampled_outputs,
    needs=needs,
    inspect=inspect_prompts,
    reshape=reshape,
    data=data,
    environment=TORCH_ENVIRONMENT,
)
