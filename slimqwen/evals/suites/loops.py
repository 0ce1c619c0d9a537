"""Loops: responses that repeat themselves to the end."""

_LEAST_REPEATS = 3
_LEAST_CHARACTERS = 60


def is_looping(text: str) -> bool:
    """Whether a text ends with the same characters three times or more in a row, 60 characters or more in all.

    After Holtzman et al. (2020), who call a generation repetitive where a phrase stands three times or more at its end.
    Characters do for languages without spaces; the least length lets a response end with "no, no, no". A loop whose
    repeats vary, as by a counter, shows only by running to the token limit.
    """
    text = text.rstrip()
    return any(
        text.endswith(text[-period:] * max(_LEAST_REPEATS, -(-_LEAST_CHARACTERS // period)))
        for period in range(1, len(text) // _LEAST_REPEATS + 1)
    )
