"""Prompts for a model to continue where nobody gives it a text: its vocabulary, its chat template, a list of seeds.

A model's own text is as good for calibration as public text (Williams et al., arXiv 2410.17170). There each text is
drawn from the begin token, the first tokens at a temperature that falls linearly, so that texts differ. The families
here have no begin token: a text begins with a token drawn from the vocabulary. A model with a chat template also writes
questions of its own, as it begins a user's turn (Xu et al., arXiv 2406.08464), and responds to them and to the
questions of eval/texts/seed_prompts.jsonl.

Prompt number n is the same whatever was drawn before it, so that an interrupted stage can go on.
"""

import contextlib
import functools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from slimqwen.text.chats import ChatRenderer
from slimqwen.text.corpus import END_OF_TEXT, file_digest, resolve_text
from slimqwen.text.documents import Document, read_documents

Tokens = list[int]

FALLING_TOKENS: Final = 10
"""First tokens of a text, which the model draws while the temperature falls."""

FIRST_TEMPERATURE: Final = 1.5
"""Temperature of the first drawn token; from there it falls linearly to 1."""

_QUESTION_TOKENS = 64
_MARK = "markofthequestion"
_KINDS = ("seed", "seed", "question", "text")


def seeds_file() -> Path:
    """Path of eval/texts/seed_prompts.jsonl: questions to which a model with a chat template responds."""
    return resolve_text("seed_prompts", Path())


def seeds_digest() -> str:
    """SHA-256 of the file of `seeds_file`."""
    return file_digest(seeds_file(), "seed prompts")


class OwnPrompts:
    """Prompts for a model to continue that need no text of the user; they are numbered from 0."""

    def __init__(self, folder: Path, tokenizer: Any, seed: int, longest: int) -> None:
        """Prepare the prompts of a checkpoint.

        Args:
            seed: seed of the random order and of every drawn token.
            longest: largest number of tokens of a prompt.
        """
        self._tokenizer, self._seed, self._longest = tokenizer, seed, longest
        self._renderer = ChatRenderer(folder)
        self._has_template = "default" in self._renderer.templates
        self._seeds = list(read_documents(seeds_file()))
        random.Random(f"{seed} seeds").shuffle(self._seeds)
        self._first_tokens = _list_first_tokens(tokenizer)
        random.Random(f"{seed} first tokens").shuffle(self._first_tokens)
        self._ends = {tokenizer.eos_token_id, *tokenizer.all_special_ids}

    def write(self, engine: Any, first: int, count: int) -> list[Tokens]:
        """Make `count` prompts from number `first` on; the engine writes the parts that come from the model itself.

        Args:
            engine: a `vllm.LLM` on the checkpoint.

        Returns:
            Token ids of each prompt, in the order of their numbers.
        """
        kinds = {number: self._kind(number) for number in range(first, first + count)}
        begun = {number: self._begin(number, kind) for number, kind in kinds.items() if kind != "seed"}
        self._continue(engine, begun)
        prompts = {
            number: self._render_seed(self._seed_of(number)) for number in kinds if kinds[number] == "seed"
        }
        asked = {number: begun[number] for number in begun if kinds[number] == "question"}
        opening = len(self._opening)
        for number, ids in self._finish(engine, asked).items():
            question = self._tokenizer.decode(ids[opening:], skip_special_tokens=True).strip()
            # A question without a word is no question: a seed is in its place.
            document = (
                Document("a question of the model's own", prompt=question)
                if question
                else self._seed_of(number)
            )
            prompts[number] = self._render_seed(document)
        prompts |= {number: ids for number, ids in begun.items() if kinds[number] == "text"}
        return [prompts[number][: self._longest] for number in kinds]

    def _kind(self, number: int) -> str:
        kind = _KINDS[number % len(_KINDS)]
        if kind == "seed" and _seed_number(number) >= len(self._seeds):
            kind = "question"  # each seed is asked once
        return "text" if kind == "question" and not self._has_template else kind

    def _seed_of(self, number: int) -> Document:
        return self._seeds[_seed_number(number) % len(self._seeds)]

    def _begin(self, number: int, kind: str) -> Tokens:
        """The tokens before those that the engine draws: what opens a text or a user's turn, and a first token."""
        drawn = self._first_tokens[number % len(self._first_tokens)]
        return [*(self._opening if kind == "question" else self._begin_of_text), drawn]

    @functools.cached_property
    def _begin_of_text(self) -> Tokens:
        known = self._tokenizer.get_vocab()
        begin = self._tokenizer.bos_token_id
        begin = known.get(END_OF_TEXT) if begin is None else begin
        return [] if begin is None else [begin]

    @functools.cached_property
    def _opening(self) -> Tokens:
        """What a chat template writes before a user's first message."""
        text = self._renderer.render([{"role": "user", "content": _MARK}])
        return self._ids(text.partition(_MARK)[0])

    def _render_seed(self, seed: Document) -> Tokens:
        """The tokens of a seed: as a chat where there is a template, without tools where it renders none."""
        messages = seed.messages or [{"role": "user", "content": seed.prompt}]
        if not self._has_template:
            return self._ids(str(messages[-1]["content"]))
        if seed.tools:
            with contextlib.suppress(Exception):  # templates raise exceptions of any type
                ids = self._ids(self._renderer.render(messages, seed.tools, to_continue=True))
                if len(ids) <= self._longest:
                    return ids
        return self._ids(self._renderer.render(messages, to_continue=True))

    def _ids(self, text: str) -> Tokens:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _continue(self, engine: Any, begun: dict[int, Tokens]) -> None:
        """Draw `FALLING_TOKENS` tokens for each beginning, at a temperature that falls; an end is not taken."""
        from vllm import SamplingParams

        for step in range(FALLING_TOKENS):
            temperature = FIRST_TEMPERATURE + (1 - FIRST_TEMPERATURE) * step / FALLING_TOKENS
            settings = [
                SamplingParams(max_tokens=1, temperature=temperature, seed=self._draw(number, step))
                for number in begun
            ]
            for number, tokens in _generate(engine, begun, settings).items():
                begun[number] += [token for token in tokens if token not in self._ends]

    def _finish(self, engine: Any, asked: dict[int, Tokens]) -> dict[int, Tokens]:
        """Draw the rest of each question."""
        from vllm import SamplingParams

        settings = [
            SamplingParams(
                max_tokens=_QUESTION_TOKENS, temperature=1.0, seed=self._draw(number, FALLING_TOKENS)
            )
            for number in asked
        ]
        return {
            number: asked[number] + tokens for number, tokens in _generate(engine, asked, settings).items()
        }

    def _draw(self, number: int, step: int) -> int:
        return (self._seed * 1_000_003 + number) * (FALLING_TOKENS + 1) + step


def _seed_number(number: int) -> int:
    """Number of the seed that a prompt is or, where a question of the model has no word, becomes."""
    return number // len(_KINDS) * _KINDS.count("seed") + number % len(_KINDS)


def _generate(engine: Any, prompts: dict[int, Tokens], settings: Sequence[Any]) -> dict[int, Tokens]:
    """The engine's continuation of each prompt."""
    if not prompts:
        return {}
    asked = [{"prompt_token_ids": list(ids)} for ids in prompts.values()]
    answers = engine.generate(asked, list(settings), use_tqdm=False)
    return {
        number: list(answer.outputs[0].token_ids) for number, answer in zip(prompts, answers, strict=True)
    }


def _list_first_tokens(tokenizer: Any) -> Tokens:
    """The ids that a text may begin with: no added token, no piece of a character, not white space alone."""
    special = set(tokenizer.get_added_vocab().values())
    ids = sorted(set(tokenizer.get_vocab().values()) - special)
    texts = tokenizer.batch_decode([[id_] for id_ in ids])
    return [id_ for id_, text in zip(ids, texts, strict=True) if text.strip() and "\ufffd" not in text]
