"""Log lines of this package in vLLM's own log."""

import logging


def join() -> None:
    """Let this package's lines appear where vLLM's do, unless the process has its own logging."""
    ours, theirs = logging.getLogger("slimqwen"), logging.getLogger("vllm")
    # vLLM configures only its own loggers, in engine and worker processes before it loads plugins: elsewhere
    # everything below a warning would be lost.
    if theirs.handlers and not ours.hasHandlers():
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
