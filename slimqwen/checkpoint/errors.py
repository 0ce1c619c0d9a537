"""What can be wrong with a checkpoint."""

from slimqwen.errors import SlimqwenError


class MissingCheckpointError(SlimqwenError):
    """There is no checkpoint in the folder."""


class CorruptCheckpointError(SlimqwenError):
    """The checkpoint's files contradict each other or its manifest."""


class UnsupportedFormatError(SlimqwenError):
    """The checkpoint is sound, in a format for which something is not possible."""
