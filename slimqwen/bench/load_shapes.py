"""Shapes of load: whether prompts are new text, repeat prefixes, or continue sessions. A workload names its shape.

A shape makes the prompts of one round. `place` is the index of a class among the workload's classes.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

from slimqwen.text.prompts import PromptCutter, Tokens

SUFFIX_TOKENS = 16
"""New text at the end of a prompt whose beginning was sent before, tokens."""


class NewText:
    """The shape in which each prompt is new text, and the base class of all shapes.

    Attributes:
        abandoned: number of further requests of a class whose clients close the connection, alternately before the
            response and in the middle of it. They are not measured.
        whole_blocks: whether a prompt consists of whole blocks of the server's prefix cache and a suffix.
    """

    abandoned: ClassVar[int] = 0
    whole_blocks: ClassVar[bool] = False

    def __init__(self, cutter: PromptCutter, more_text: Iterator[int]) -> None:
        """Begin a round.

        Args:
            cutter: cuts new prompts from the workload's text.
            more_text: yields tokens without end, for prompts that later classes make longer.
        """
        self.cutter, self.more_text = cutter, more_text

    @staticmethod
    def known_from(place: int) -> int | None:
        """Index of the earlier class whose prompts this class's prompts begin with; None if all text is new."""
        return None

    def prompts(self, place: int, lengths: Sequence[int]) -> list[Tokens]:
        """Make the prompts of a class, with these lengths in tokens."""
        return [prompt for length in lengths for prompt in self.cutter.cut(1, length)]

    def keep(self, prompts: Sequence[Tokens], texts: Sequence[str]) -> None:
        """Take the responses to the last class's prompts, for shapes whose later classes continue from them."""


class Prefixes(NewText):
    """The first class sends prefixes for the first time, every other one sends them again with new suffixes."""

    whole_blocks = True
    _sent: Sequence[Tokens] = ()

    @staticmethod
    def known_from(place: int) -> int | None:
        """0, the first class, for every later class; None for the first."""
        return 0 if place else None

    def prompts(self, place: int, lengths: Sequence[int]) -> list[Tokens]:
        """Make the prompts of a class: the prefixes of the first class in its order, each followed by new text."""
        length = lengths[0] - SUFFIX_TOKENS
        self._sent = self._sent if place else self.cutter.cut(len(lengths), length)
        suffixes = self.cutter.cut(len(lengths), SUFFIX_TOKENS)
        pairs = zip(itertools.cycle(self._sent), suffixes, strict=False)
        return [prefix[:length] + suffix for prefix, suffix in pairs]


class Sessions(NewText):
    """Each class is the next turn of the same sessions: earlier prompt, its response, and new text as from a tool.

    Prompts are token IDs, as the engine gets rendered chats. A response comes back as text and is tokenized again, as
    if a client of the chat API had sent it back. In each turn the clients of two further sessions close the connection.
    """

    abandoned = 2
    _sent: Sequence[tuple[int, Tokens]] = ()

    @staticmethod
    def known_from(place: int) -> int | None:
        """Index of the class before, whose turn this one continues; None for the first."""
        return place - 1 if place else None

    def prompts(self, place: int, lengths: Sequence[int]) -> list[Tokens]:
        """Make the prompts of a turn: prompt and response of the turn before, and new text up to the wanted length."""
        if not place:
            return super().prompts(place, lengths)
        # The number of new tokens does not depend on the response, so that all variants get the same text.
        return [
            [*turn, *itertools.islice(self.more_text, length - sent)][:length]
            for length, (sent, turn) in zip(lengths, self._sent, strict=True)
        ]

    def keep(self, prompts: Sequence[Tokens], texts: Sequence[str]) -> None:
        """Note each prompt with its response; an abandoned request has no response."""
        self._sent = [
            (len(prompt), [*prompt, *self.cutter.tokenize(text)])
            for prompt, text in zip(prompts, itertools.chain(texts, itertools.repeat("")), strict=False)
        ]


SHAPES: Mapping[str, type[NewText]] = MappingProxyType(
    {"new_text": NewText, "prefixes": Prefixes, "sessions": Sessions}
)
"""Name in a workload's file -> shape."""
