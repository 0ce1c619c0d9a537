"""The stage `sample_outputs`: what the checkpoint itself says, as text to re-distil its MTP head on.

The head is to guess the target's words, so it learns from them: documents of a corpus are begun, and the target goes
on by vLLM, as quantised and pruned as it is served (self-distillation as in FastMTP, arXiv 2509.18362). The
checkpoint goes through unchanged, with `sampled_outputs.jsonl` beside it; the stage after this takes that file out.

Speculation is off, chunks of requests are fixed and every request has its own seed, so the same inputs give the same
tokens.
"""

import itertools
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from slimqwen import checkpoint
from slimqwen.progress import Progress
from slimqwen.recipe.corpus import CorpusError, TextSource, digests
from slimqwen.recipe.prune_vocab import file_documents
from slimqwen.recipe.stage import Facts, Needs, Parameters, Stage

OUTPUTS = "sampled_outputs.jsonl"

_ENGINE_BYTES = 3 * 2**30
"""Resident size of vLLM, its KV cache and activations, measured at 2.1 GiB for a small model."""


class Prompts(TextSource):
    """The documents that the target goes on with.

    Attributes:
        source: tinyworld generates conversations and prose of the embedded world; file reads `path`.
        path: a .txt or .jsonl file ({"text": …} or {"prompt": …} a line), relative to the recipe. A prompt is taken
            whole, of a text the first third.
        longest: tokens of a prompt at most; longer ones are cut at their end.
        seed: of the generator.
    """

    longest: Annotated[int, Field(ge=4)] = 128
    seed: int = 1


class SampleOutputsParameters(Parameters):
    """What a recipe may say of this stage.

    Attributes:
        prompts: what is gone on with.
        texts: continuations to train on, sampled.
        held_out: continuations to measure on, greedy as acceptance is measured; of other prompts.
        tokens: of a continuation at most.
        temperature: of the texts to train on.
        chunk: requests given to the engine together.
        threads: of the CPU arithmetic; a part of the recipe because it decides the order of summation.
    """

    prompts: Prompts = Prompts()
    texts: Annotated[int, Field(ge=16)] = 1024
    held_out: Annotated[int, Field(ge=8)] = 96
    tokens: Annotated[int, Field(ge=16)] = 96
    temperature: Annotated[float, Field(gt=0, le=2)] = 0.7
    chunk: Annotated[int, Field(ge=1)] = 64
    threads: Annotated[int, Field(ge=1)] = 2


@dataclass(frozen=True)
class Output:
    """One continuation by the target, in token ids."""

    prompt: tuple[int, ...]
    continuation: tuple[int, ...]
    held_out: bool


def run(source: Path, destination: Path, parameters: SampleOutputsParameters, progress: Progress) -> Facts:
    """Copy source to destination and write what it says to `OUTPUTS` there.

    Raises:
        CorpusError: the corpus is missing, malformed or too short.
    """
    # Read once, when torch is imported; without it vLLM takes a single thread.
    os.environ["OMP_NUM_THREADS"] = str(parameters.threads)
    from transformers import AutoTokenizer
    from vllm import SamplingParams

    from slimqwen.serving.in_process import engine

    progress("loading", 0, 0)
    tokenizer = AutoTokenizer.from_pretrained(source)
    total = parameters.texts + parameters.held_out
    prompts = list(itertools.islice(_prompts(parameters.prompts, tokenizer), total))
    if len(prompts) < total:
        raise CorpusError(
            f"{parameters.prompts.path} begins {len(prompts)} different documents, {total} are needed; add text or "
            "ask for fewer"
        )
    checkpoint.carry_all(source, destination, leave_out=[OUTPUTS])
    written = 0
    longest = parameters.prompts.longest + parameters.tokens + 1
    with (
        engine(source, max_model_len=longest, max_num_seqs=parameters.chunk) as llm,
        (destination / OUTPUTS).open("w", encoding="utf-8") as lines,
    ):
        for first in range(0, total, parameters.chunk):
            progress("sampling", first, total)
            chunk = prompts[first : first + parameters.chunk]
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
                said = list(answer.outputs[0].token_ids)
                row = {
                    "prompt": prompts[number],
                    "continuation": said,
                    "held_out": number < parameters.held_out,
                }
                lines.write(json.dumps(row) + "\n")
                written += len(said)
    return {"continuations": total, "tokens": written}


def read_outputs(folder: Path) -> Iterator[Output]:
    """The continuations beside a checkpoint, those to measure on first.

    Raises:
        CorpusError: there are none.
    """
    file = folder / OUTPUTS
    if not file.is_file():
        raise CorpusError(
            f"{folder} has no {OUTPUTS}; put the stage sample_outputs before the one that needs it"
        )
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            yield Output(tuple(row["prompt"]), tuple(row["continuation"]), row["held_out"])


def needs(source: Path, parameters: SampleOutputsParameters) -> Needs:
    """A copy of the checkpoint and the texts; the engine with its weights."""
    size = checkpoint.bytes_on_disk(source)
    texts = 16 * (parameters.texts + parameters.held_out) * (parameters.prompts.longest + parameters.tokens)
    return Needs(disk_bytes=size + texts, memory_bytes=_ENGINE_BYTES + size)


def data(parameters: SampleOutputsParameters) -> dict[str, str]:
    """The digests that decide the prompts."""
    return digests(parameters.prompts, "prompts")


def _prompts(prompts: Prompts, tokenizer: Any) -> Iterator[list[int]]:
    """Beginnings of documents, in token ids, no two alike."""
    seen: set[tuple[int, ...]] = set()
    for beginning, whole in _beginnings(prompts):
        ids = tokenizer(beginning, add_special_tokens=False)["input_ids"]
        if whole:
            ids = ids[: max(4, len(ids) // 3)]
        ids = ids[: prompts.longest]
        if len(ids) >= 4 and tuple(ids) not in seen:
            seen.add(tuple(ids))
            yield ids


def _beginnings(prompts: Prompts) -> Iterator[tuple[str, bool]]:
    """(text, whether it is a whole document of which the beginning is to be taken)."""
    if prompts.path is None:
        yield from _tinyworld_beginnings(prompts.seed)
    elif prompts.path.suffix == ".jsonl":
        yield from _given_beginnings(prompts.path)
    else:
        yield from ((document, True) for document in file_documents(prompts.path))


def _given_beginnings(path: Path) -> Iterator[tuple[str, bool]]:
    try:
        with path.open(encoding="utf-8") as lines:
            for line in filter(str.strip, lines):
                row = json.loads(line)
                yield (str(row["prompt"]), False) if "prompt" in row else (str(row["text"]), True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorpusError(
            f'{path}: not usable ({error!r}); give {{"text": …}} or {{"prompt": …}} a line'
        ) from None


def _tinyworld_beginnings(seed: int) -> Iterator[tuple[str, bool]]:
    # Its tokenizer module imports transformers.
    from slimqwen.tinyworld.documents import SHORT_MIX, DocumentSampler, Part
    from slimqwen.tinyworld.tasks import left_out_texts
    from slimqwen.tinyworld.world import World

    world = World()
    # Longer answers than most questions have: single words say little about drafting.
    mix = SHORT_MIX | {"prose": 0.6, "chat": 0.3, "echo": 0.0, "copy": 0.0}
    for document in DocumentSampler(world, left_out_texts(world), mix).stream(seed):
        parts: Sequence[Part] = document.parts
        yield (parts[0].text, len(parts) == 1)


STAGE = Stage(
    name="sample_outputs",
    parameters=SampleOutputsParameters,
    run=run,
    needs=needs,
    data=data,
    code=("slimqwen.serving.in_process",),
    packages=("vllm", "torch", "transformers", "tokenizers"),
    environment={"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_WAIT_POLICY": "passive"},
)
