"""Errors about checkpoints."""

from slimqwen.errors import SlimqwenError


class MissingCheckpointError(SlimqwenError):
    """There is no checkpoint in the folder."""


class CorruptCheckpointError(SlimqwenError):
    """The checkpoint's files contradict each other or its manifest."""


class UnsupportedFormatError(SlimqwenError):
    """The checkpoint is sound, but its format does not support what was asked for."""
