"""Logging of this package into vLLM's own log."""

import logging


def join() -> None:
    """Send this package's log lines where vLLM's go, unless the process has configured logging itself."""
    ours, theirs = logging.getLogger("slimqwen"), logging.getLogger("vllm")
    # vLLM configures only its own loggers, in engine and workers before it loads plugins; without this, log lines of
    # this package below a warning would be lost.
    if theirs.handlers and not ours.hasHandlers():
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
