"""The token to put before each scored text, as in training; model families name it differently."""

from collections.abc import Mapping, Sequence

Prefix = str | tuple[str, ...]
"""Text of the token, or of several of which the first that a checkpoint has is taken."""


def find_prefix(prefix: Prefix, vocabularies: Sequence[Mapping[str, int]]) -> list[int] | None:
    """Find the first prefix that is a token of every vocabulary.

    Args:
        prefix: text of the token, or several of them in order of preference.
        vocabularies: token -> id, for each checkpoint.

    Returns:
        The token's id in each vocabulary; None if there is no such token.
    """
    for text in (prefix,) if isinstance(prefix, str) else prefix:
        if all(text in vocabulary for vocabulary in vocabularies):
            return [int(vocabulary[text]) for vocabulary in vocabularies]
    return None
