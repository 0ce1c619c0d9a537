"""Where the libraries that measure may print: a log file."""

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

_STANDARD_ERROR = 2


@contextlib.contextmanager
def output_to(log: Path, *loggers: str) -> Iterator[None]:
    """Append what is printed, warned or sent to the named loggers to a file, for as long as the context lasts.

    It replaces sys.stdout and sys.stderr of the whole process, and the descriptor of standard error, which compiled
    code writes to: a progress bar must hold its own stream, on another descriptor.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8", buffering=1) as stream:
        handler = logging.StreamHandler(stream)
        for name in loggers:
            logging.getLogger(name).addHandler(handler)
        shown = os.dup(_STANDARD_ERROR)
        os.dup2(stream.fileno(), _STANDARD_ERROR)
        try:
            with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
                yield
        finally:
            os.dup2(shown, _STANDARD_ERROR)
            os.close(shown)
            for name in loggers:
                logging.getLogger(name).removeHandler(handler)
