"""Errors about checkpoints."""

from slimqwen.errors import SlimqwenError


class MissingCheckpointError(SlimqwenError):
    """There is no checkpoint in the folder."""


class CorruptCheckpointError(SlimqwenError):
    """The checkpoint's files contradict each other or its manifest."""

    def __init__(self, fault: str, cure: str = "") -> None:
        """An error of one fault.

        Args:
            fault: the cause, with the file or folder.
            cure: what helps; by default, to make or download the checkpoint anew.
        """
        super().__init__(fault, *([cure] if cure else []))

    def __str__(self) -> str:
        fault, *cures = self.args
        return "; ".join([fault, *(cures or ["make or download the checkpoint anew"])])

    @property
    def faults(self) -> list[str]:
        """The fault as a list of one line, without a cure."""
        return [str(self)]

    def with_cure(self, cure: str) -> "CorruptCheckpointError":
        """The same error with this cure added to its message; the default cure is dropped."""
        fault, *cures = self.args
        return CorruptCheckpointError(fault, "; ".join([*cures, cure]))
