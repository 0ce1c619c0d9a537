"""Prompts of exact token length cut from real text that is never used twice."""

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from slimqwen.errors import SlimqwenError

Tokens = list[int]


class DocumentsError(SlimqwenError):
    """The text that prompts are cut from is missing or too short."""


def documents(source: str, seed: int, root: Path) -> Iterator[str]:
    """The documents of a workload: passages of the tiny world without end, or a text file's.

    Passages are drawn by a seed of their own, so they are not the texts that training drew.

    Raises:
        DocumentsError: there is no such file.
    """
    if source == "tinyworld":
        yield from _tinyworld_passages(seed)
    file = root / source
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise DocumentsError(f"{source}: {error.strerror}; name tinyworld or a UTF-8 text file") from error
    yield from filter(None, (part.strip() for part in text.split("\n\n")))


def _tinyworld_passages(seed: int) -> Iterator[str]:
    from slimqwen.tinyworld.prose import open_cast, passage
    from slimqwen.tinyworld.world import World

    world, chance = World(), random.Random(seed)
    while True:
        yield passage(world, chance, open_cast(world, chance))


class PromptCutter:
    """Cuts prompts from a stream of documents, each prompt from documents of its own.

    Attributes:
        documents_used: how far into the stream it is.
    """

    def __init__(self, texts: Iterator[str], tokenize: Callable[[str], Tokens]) -> None:
        self._texts = texts
        self._tokenize = tokenize
        self._given: set[tuple[int, ...]] = set()
        self.documents_used = 0

    def go_on(self, documents_used: int, given: Iterable[Tokens]) -> None:
        """Take up where another cutter of the same stream stopped, which gave these prompts."""
        for _ in range(documents_used - self.documents_used):
            next(self._texts, None)
        self.documents_used = documents_used
        self._given.update(map(tuple, given))

    def cut(self, count: int, length: int) -> list[Tokens]:
        """The next `count` prompts of exactly `length` tokens, all different from any given before.

        Raises:
            DocumentsError: the text is used up.
        """
        prompts: list[Tokens] = []
        while len(prompts) < count:
            tokens: Tokens = []
            while len(tokens) < length:
                text = next(self._texts, None)
                if text is None:
                    raise DocumentsError(
                        f"the workload's text is used up: {count} prompts of {length} tokens do not fit in what is "
                        "left of it; give it more text or fewer requests"
                    )
                self.documents_used += 1
                tokens += self._tokenize(f"{text}\n")
            prompt = tokens[:length]
            if tuple(prompt) not in self._given:
                self._given.add(tuple(prompt))
                prompts.append(prompt)
        return prompts


def digest(prompts: list[Tokens]) -> str:
    """SHA-256 of prompts in their order."""
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()
