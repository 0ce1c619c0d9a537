"""The stage `write_text`: the model writes the text that later stages read where a recipe says `corpus: self`.

A recipe need not name this stage: it is put first, and writes as many tokens as the stage that reads most needs. The
checkpoint passes through unchanged, with `own_text.jsonl` beside it, which later stages pass on: prompts of
`OwnPrompts` and the model's continuations, a {"text": …} a line. An interrupted run continues after the last whole
chunk of texts.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from slimqwen.checkpoint.files import carry_all
from slimqwen.models.outline import Outline
from slimqwen.progress import Progress
from slimqwen.recipe.own_prompts import OwnPrompts, seeds_digest
from slimqwen.recipe.stage import TORCH_ENVIRONMENT, Facts, Fault, Needs, Parameters, Stage
from slimqwen.records import store
from slimqwen.text.corpus import END_OF_TEXT, OWN_TEXT

_LONGEST_PROMPT = 256


class WriteTextParameters(Parameters):
    """Parameters of the stage.

    Attributes:
        tokens: number of tokens to write, at least; the last chunk may exceed it.
        longest: largest number of tokens that continue a prompt.
        chunk: number of requests that the engine gets together.
        seed: seed of the random order and of every drawn token.
        threads: CPU threads; a parameter because it affects the order of summation.
    """

    tokens: Annotated[int, Field(ge=16)] = 524_288
    longest: Annotated[int, Field(ge=16)] = 512
    chunk: Annotated[int, Field(ge=1)] = 64
    seed: int = 0
    threads: Annotated[int, Field(ge=1)] = 2


def write_own_text(
    source: Path, destination: Path, parameters: WriteTextParameters, progress: Progress, *, unfinished: Path
) -> Facts:
    """Copy source to destination and write the model's text into own_text.jsonl there.

    A killed run continues from `unfinished`, with the same result.
    """
    # torch reads the variable at import; without it vLLM uses a single thread.
    os.environ["OMP_NUM_THREADS"] = str(parameters.threads)
    from transformers import AutoTokenizer
    from vllm import SamplingParams

    from slimqwen.serving.in_process import engine

    progress("loading", 0, 0)
    tokenizer = AutoTokenizer.from_pretrained(source)
    prompts = OwnPrompts(source, tokenizer, parameters.seed, _LONGEST_PROMPT)
    carry_all(source, destination, leave_out=[OWN_TEXT])
    chunks = [file.read_text(encoding="utf-8") for file in _finished_chunks(unfinished)]
    tokens = sum(_count(tokenizer, chunk) for chunk in chunks)
    with engine(
        source,
        max_model_len=_longest(parameters),
        max_num_seqs=parameters.chunk,
    ) as llm:
        while tokens < parameters.tokens:
            progress("writing", tokens, parameters.tokens)
            first = len(chunks) * parameters.chunk
            asked = prompts.write(llm, first, parameters.chunk)
            settings = [
                SamplingParams(
                    max_tokens=parameters.longest, temperature=1.0, seed=parameters.seed * 1_000_003 + number
                )
                for number in range(first, first + len(asked))
            ]
            answers = llm.generate([{"prompt_token_ids": ids} for ids in asked], settings, use_tqdm=False)
            texts = [
                tokenizer.decode([*ids, *answer.outputs[0].token_ids]).removeprefix(END_OF_TEXT)
                for ids, answer in zip(asked, answers, strict=True)
            ]
            lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
            store.publish(unfinished / f"{len(chunks)}.jsonl", lines.encode())
            chunks.append(lines)
            tokens += _count(tokenizer, lines)
    (destination / OWN_TEXT).write_text("".join(chunks), encoding="utf-8")
    return {"texts": sum(chunk.count("\n") for chunk in chunks), "tokens": tokens}


def _finished_chunks(folder: Path) -> Iterator[Path]:
    """The chunks that an earlier run has written, in their order."""
    number = 0
    while (file := folder / f"{number}.jsonl").is_file():
        yield file
        number += 1


def _count(tokenizer: Any, lines: str) -> int:
    """Tokens that a reader will count: texts are divided by `END_OF_TEXT`."""
    texts = [json.loads(line)["text"] + END_OF_TEXT for line in lines.splitlines()]
    return sum(map(len, tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]))


def _longest(parameters: WriteTextParameters) -> int:
    return _LONGEST_PROMPT + parameters.longest + 1


def inspect_writing(outline: Outline, parameters: WriteTextParameters) -> Iterator[Fault]:
    """Find faults: texts longer than the model's context."""
    longest = _longest(parameters)
    if longest > (context := outline.text.get("max_position_embeddings", longest)):
        yield Fault(
            f"{longest} tokens exceed the context of {outline.name}, {context}; lower longest", "longest"
        )


def needs(outline: Outline, parameters: WriteTextParameters) -> Needs:
    """Needs: disk for a copy of the checkpoint and the text; memory for the engine with its weights."""
    tokens = parameters.tokens
    return Needs.of_engine(outline, tokens, 8, tokens / parameters.chunk)


STAGE = Stage(
    name="write_text",
    parameters=WriteTextParameters,
    run=write_own_text,
    needs=needs,
    inspect=inspect_writing,
    data=lambda parameters: {"seeds": seeds_digest()},
    environment=TORCH_ENVIRONMENT,
    resumes=True,
)
