"""Errors about checkpoints."""

from slimqwen.errors import SlimqwenError


class MissingCheckpointError(SlimqwenError):
    """There is no checkpoint in the folder."""


class CorruptCheckpointError(SlimqwenError):
    """A file of the checkpoint is missing or damaged, or contradicts the other files or the manifest."""

    def __init__(self, fault: str, cure: str = "") -> None:
        """Create the error from one fault and its cure.

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
        """The whole message, fault and cure, as a list of one line."""
        return [str(self)]

    def with_cure(self, cure: str) -> "CorruptCheckpointError":
        """A copy of the error with this cure at the end of its message; the default cure is dropped."""
        fault, *cures = self.args
        return CorruptCheckpointError(fault, "; ".join([*cures, cure]))
