"""Shapes of load: what the prompts of a workload's classes begin with. A workload names its shape.

A shape makes the prompts of one round. A class is known here by its place among the classes of the workload.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

from slimqwen.text.prompts import PromptCutter, Tokens

SUFFIX_TOKENS = 16
"""New text at the end of a prompt whose beginning was sent before, tokens."""


class NewText:
    """Each prompt is new text.

    Attributes:
        abandoned: further requests of a class, sent at the same time, whose clients close the connection: alternately
            before the response and in the middle of it. They have no rows.
        whole_blocks: whether prompts are whole attention blocks of the server and a suffix.
    """

    abandoned: ClassVar[int] = 0
    whole_blocks: ClassVar[bool] = False

    def __init__(self, cutter: PromptCutter, more_text: Iterator[int]) -> None:
        """Begin a round; `more_text` yields tokens without end, for prompts that later classes make longer."""
        self.cutter, self.more_text = cutter, more_text

    @staticmethod
    def known_from(place: int) -> int | None:
        """Place of the earlier class that sent the beginnings of a class's prompts; None if all text is new."""
        return None

    def prompts(self, place: int, lengths: Sequence[int]) -> list[Tokens]:
        """Make the prompts of a class, with these lengths in tokens."""
        return [prompt for length in lengths for prompt in self.cutter.cut(1, length)]

    def keep(self, prompts: Sequence[Tokens], texts: Sequence[str]) -> None:
        """Take the responses to the prompts of the class that was sent last."""


class Prefixes(NewText):
    """The first class sends prefixes for the first time, every other one sends them again with new suffixes."""

    whole_blocks = True
    _sent: Sequence[Tokens] = ()

    @staticmethod
    def known_from(place: int) -> int | None:
        """The first class."""
        return 0 if place else None

    def prompts(self, place: int, lengths: Sequence[int]) -> list[Tokens]:
        """Prefixes in the order of the first class, each followed by new text."""
        length = lengths[0] - SUFFIX_TOKENS
        self._sent = self._sent if place else self.cutter.cut(len(lengths), length)
        suffixes = self.cutter.cut(len(lengths), SUFFIX_TOKENS)
        pairs = zip(itertools.cycle(self._sent), suffixes, strict=False)
        return [prefix[:length] + suffix for prefix, suffix in pairs]


class Sessions(NewText):
    """Each class is the next turn of the sessions of the class before: prompt, response, the result of a tool.

    Prompts are token IDs, as rendered chats are for the engine, too; the response comes back as text and is tokenized
    again, as by a client of the chat API. In each turn two more sessions are left by their clients.
    """

    abandoned = 2
    _sent: Sequence[tuple[int, Tokens]] = ()

    @staticmethod
    def known_from(place: int) -> int | None:
        """The turn before."""
        return place - 1 if place else None

    def prompts(self, place: int, lengths: Sequence[int]) -> list[Tokens]:
        """The turn before, continued to the wanted length with tokens that are the same for all variants."""
        if not place:
            return super().prompts(place, lengths)
        # The number of new tokens does not depend on the response, so that all variants get the same text.
        return [
            [*turn, *itertools.islice(self.more_text, length - sent)][:length]
            for length, (sent, turn) in zip(lengths, self._sent, strict=True)
        ]

    def keep(self, prompts: Sequence[Tokens], texts: Sequence[str]) -> None:
        """Keep each prompt with its response; an abandoned one has no text."""
        self._sent = [
            (len(prompt), [*prompt, *self.cutter.tokenize(text)])
            for prompt, text in zip(prompts, itertools.chain(texts, itertools.repeat("")), strict=False)
        ]


SHAPES: Mapping[str, type[NewText]] = MappingProxyType(
    {"new_text": NewText, "prefixes": Prefixes, "sessions": Sessions}
)
"""Name in a workload's file -> shape."""
