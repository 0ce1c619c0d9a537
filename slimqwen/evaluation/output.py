"""Where the libraries that measure may print: a log file."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def output_to(log: Path, *loggers: str) -> Iterator[None]:
    """Append what is printed, warned or sent to the named loggers to a file, for as long as the context lasts.

    It replaces sys.stdout and sys.stderr of the whole process: a progress bar must hold its own stream.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8", buffering=1) as stream:
        handler = logging.StreamHandler(stream)
        for name in loggers:
            logging.getLogger(name).addHandler(handler)
        try:
            with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
                yield
        finally:
            for name in loggers:
                logging.getLogger(name).removeHandler(handler)
