"""Finds texts that share 13 tokens in a row with others, such as the items by which a model will be judged.

Brown et al. (arXiv 2005.14165, appendix C) call word n-grams of that length an overlap.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

LENGTH: Final = 13
"""Tokens in a row that make an overlap."""


class Overlap:
    """Known texts, as the set of all their runs of 13 tokens.

    Args:
        tokenize: text -> token ids.
        known: the texts.
    """

    def __init__(self, tokenize: Callable[[str], Sequence[int]], known: Iterable[str]) -> None:
        self._tokenize = tokenize
        self._runs = {run for text in known for run in self._list_runs(text)}

    def is_in(self, text: str) -> bool:
        """Whether a text shares a run of 13 tokens with a known text; False for a shorter text."""
        return any(run in self._runs for run in self._list_runs(text))

    def _list_runs(self, text: str) -> Iterable[int]:
        ids = tuple(self._tokenize(text))
        return (hash(ids[start : start + LENGTH]) for start in range(len(ids) - LENGTH + 1))
