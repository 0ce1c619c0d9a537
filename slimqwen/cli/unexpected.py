"""Reports an exception that is not a SlimqwenError: one line with its cause, and the log with the traceback.

Imports little more than the standard library, because it also reports what goes wrong while other modules are imported.
"""

import contextlib
import os
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType

from slimqwen.errors import explain_os_error
from slimqwen.workspace import WorkspaceError, name_installer, repository_root


def install_hooks() -> None:
    """Report uncaught exceptions of all threads; open /dev/null as stdout or stderr of a process without them."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell: `>&-`
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))
    sys.excepthook = _report_uncaught
    threading.excepthook = lambda caught: report_unexpected(caught.exc_value or caught.exc_type())


def _report_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        _print("interrupted")
    else:
        report_unexpected(error)


def report_unexpected(error: BaseException) -> None:
    """Write the traceback of an exception into a log, and print one line with the cause and the log's path."""
    log = _write_log(error)
    place = f"the traceback is in {log}" if log else "its traceback could not be written"
    _print(f"error: {describe_cause(error)}; {place}")


def describe_cause(error: BaseException) -> str:
    """The cause of an exception on one line, and its cure if the operating system refused something."""
    words = " ".join(str(error).split())
    cause = f"unexpected {type(error).__name__}{f': {words[:500]}' if words else ''}"
    if isinstance(error, ImportError):
        return f"{cause}; run `make install` to repair .venv"
    if isinstance(error, MemoryError):
        return f"{cause}; free some memory"
    return explain_os_error(error) or cause


def _write_log(error: BaseException) -> Path | None:
    name = f"error-{time.strftime('%Y-%m-%dT%H%M%SZ', time.gmtime())}-{os.getpid()}.log"
    text = "".join(traceback.format_exception(error))
    for find_folder in (lambda: repository_root() / "logs", tempfile.gettempdir):
        with contextlib.suppress(OSError, WorkspaceError):  # gettempdir, too, where no folder is writable
            folder = Path(find_folder())
            folder.mkdir(exist_ok=True)
            with (folder / name).open("a", encoding="utf-8", errors="replace") as log:
                log.write(text)
            return folder / name
    return None


def _print(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the terminal is gone
        sys.stderr.write(f"{name_installer(line)}\n")
        sys.stderr.flush()
