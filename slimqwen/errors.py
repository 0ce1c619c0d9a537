"""The base class of all errors that a person is meant to read, and the suggestion at the end of some of them."""

import difflib
from collections.abc import Collection


class SlimqwenError(Exception):
    """An expected failure in one line: the cause, then the cure.

    The command line prints the message without a traceback and exits with code 2 (3 for a verb that gives a verdict).
    Any other exception is a defect: it prints the cause and the log that has the traceback, and exits with code 1 (3).
    """

    def __init__(self, *faults: str) -> None:
        """An error of one fault; of several, its text is a line for each, the only text of more than one line."""
        super().__init__(*faults)

    def __str__(self) -> str:
        if len(self.args) == 1:
            return str(self.args[0])
        return "\n  ".join([f"{len(self.args)} faults, nothing has run:", *self.args])

    @property
    def faults(self) -> list[str]:
        """Its faults, a line each."""
        return list(self.args)


def suggest_name(unknown: str, names: Collection[str], otherwise: str | None = None) -> str:
    """End of a message about an unknown name: the nearest known name, or two that are as near.

    If none is near, it is `otherwise`, or a list of all names.
    """
    near = difflib.get_close_matches(unknown, names, n=2)
    ratios = [difflib.SequenceMatcher(None, each, unknown).ratio() for each in near]
    nearest = [each for each, ratio in zip(near, ratios, strict=True) if ratio == ratios[0]]
    if nearest:
        return f"did you mean {' or '.join(nearest)}?"
    return otherwise or f"known are {', '.join(sorted(names))}"
