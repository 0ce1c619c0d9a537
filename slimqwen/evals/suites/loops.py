"""Loops: responses that repeat themselves to the end."""

_LEAST_REPEATS = 3
_LEAST_CHARACTERS = 60


def is_looping(text: str) -> bool:
    """Whether a text ends with one string repeated three times or more, over 60 characters or more in all.

    After Holtzman et al. (2020), who call a generation repetitive if a phrase occurs three times or more at its end.
    Characters, not words, are compared because some languages have no spaces; the least length permits an ending such
    as "no, no, no". A loop whose repeats vary, as by a counter, shows only by running to the token limit.
    """
    text = text.rstrip()
    return any(
        text.endswith(text[-period:] * max(_LEAST_REPEATS, -(-_LEAST_CHARACTERS // period)))
        for period in range(1, len(text) // _LEAST_REPEATS + 1)
    )
