"""Capture of a process's output in a log file: prints, warnings and what compiled code writes to standard error.

vLLM, llmcompressor and lm-eval print hundreds of lines a run.
"""

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

_STANDARD_ERROR = 2


@contextlib.contextmanager
def capture_output(log: Path, *loggers: str) -> Iterator[None]:
    """Append everything that the process prints to a log file while the context lasts.

    It replaces sys.stdout, sys.stderr and the file descriptor of standard error, to which compiled code and child
    processes write. A progress bar therefore needs its own stream on another descriptor.

    Args:
        log: file to append to; its folder is created.
        loggers: names of loggers whose records are appended too.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8", buffering=1) as stream:
        handler = logging.StreamHandler(stream)
        for name in loggers:
            logging.getLogger(name).addHandler(handler)
        terminal = os.dup(_STANDARD_ERROR)
        os.dup2(stream.fileno(), _STANDARD_ERROR)
        try:
            with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
                yield
        finally:
            os.dup2(terminal, _STANDARD_ERROR)
            os.close(terminal)
            for name in loggers:
                logging.getLogger(name).removeHandler(handler)
