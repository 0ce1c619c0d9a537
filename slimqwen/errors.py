"""The base class of all errors that a person is meant to read."""

from collections.abc import Sequence
from typing import Self


class SlimqwenError(Exception):
    """An expected failure in one line: the cause, then the cure.

    The command line prints the message without a traceback and exits with code 2 (3 for a verb that gives a verdict).
    Any other exception is a defect: it prints the cause and the log that has the traceback, and exits with code 1 (3).
    """

    @classmethod
    def of_faults(cls, faults: Sequence[str]) -> Self:
        """An error of one line for one fault, else with a line for each: the only error of more than one line."""
        if len(faults) == 1:
            return cls(faults[0])
        return cls("\n  ".join([f"{len(faults)} faults, nothing has run:", *faults]))

    @property
    def faults(self) -> list[str]:
        """Its faults, a line each."""
        first, *rest = str(self).split("\n  ")
        return rest or [first]
