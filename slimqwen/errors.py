"""The base class of all errors that a person is meant to read, and the suggestion at the end of some of them."""

import contextlib
import difflib
import errno
import os
import shutil
from collections.abc import Collection
from pathlib import Path

_READ_ONLY = "make it writable for this user, or work in your own clone of the repository"
_UNREADABLE = "make it readable for this user: its owner can, by `chmod a+r`"
_FULL = "free some disk space"
_FULL_BYTES = 2**20
"""Free space of a disk that counts as full, bytes."""

_OPEN_FILES = "allow more open files, such as `ulimit -n 4096`"
_CURES = {
    errno.EACCES: _READ_ONLY,
    errno.EPERM: _READ_ONLY,
    errno.EROFS: _READ_ONLY,
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EMFILE: _OPEN_FILES,
    errno.ENFILE: _OPEN_FILES,
    errno.ENOMEM: "free some memory",
}
_TEMPORARY = {
    "No usable temporary directory": "set TMPDIR to a folder that is writable",  # of tempfile
    "AF_UNIX path too long": "set TMPDIR to a folder with a shorter path, such as /tmp",  # of sockets of libraries
}
"""Words of errors about temporary files, which name no errno -> cure."""

_WRAPPED = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE)
"""Refusals that libraries in Rust and C++ report as errors of their own, with the operating system's words."""


class SlimqwenError(Exception):
    """An expected failure in one line: the cause, then the cure.

    The command line prints the message without a traceback and exits with code 2 (3 for a verb that gives a verdict).
    Any other exception is a defect: the command line prints the cause and the name of the log with the traceback, and
    exits with code 1 (3 for a verb that gives a verdict).
    """

    def __init__(self, *faults: str) -> None:
        """An error of one fault; of several, its text is a line for each, the only text of more than one line."""
        super().__init__(*faults)

    def __str__(self) -> str:
        if len(self.args) == 1:
            return str(self.args[0])
        return "\n  ".join([f"{len(self.args)} faults, nothing has run:", *self.args])

    @property
    def faults(self) -> list[str]:
        """The faults in the message, a line each."""
        return list(self.args)


def suggest_name(unknown: str, names: Collection[str], otherwise: str | None = None) -> str:
    """Suggest a known name for an unknown one, as the end of an error message: "did you mean tiny?".

    Args:
        unknown: the name that is not known.
        names: the known names. The nearest is suggested, or two that are equally near.
        otherwise: text to return if no name is near; None for a list of all names.
    """
    near = difflib.get_close_matches(unknown, names, n=2)
    ratios = [difflib.SequenceMatcher(None, each, unknown).ratio() for each in near]
    nearest = [each for each, ratio in zip(near, ratios, strict=True) if ratio == ratios[0]]
    if nearest:
        return f"did you mean {' or '.join(nearest)}?"
    return otherwise or f"known are {', '.join(sorted(names))}"


def explain_os_error(error: BaseException) -> str | None:
    """Cause and cure, on one line, of what the operating system refused, such as a full disk; None for other errors."""
    if isinstance(error, OSError) and error.errno in _CURES and error.strerror:
        place = f"{error.filename}: " if error.filename else ""
        cure = (
            _UNREADABLE
            if error.errno == errno.EACCES and _is_unreadable(error.filename)
            else _CURES[error.errno]
        )
        return f"{place}{error.strerror}; {cure}"
    for words, cure in _TEMPORARY.items():
        if words in str(error):
            return f"{' '.join(str(error).split())}; {cure}"
    for number in _WRAPPED:
        if os.strerror(number) in str(error):
            return f"{' '.join(str(error).split())}; {_CURES[number]}"
    return None


def is_full(folder: Path) -> bool:
    """Whether the disk of a folder has less than 1 MiB free, which errors of libraries do not always say.

    False if the folder is gone.
    """
    with contextlib.suppress(OSError):  # the folder is gone
        return shutil.disk_usage(folder).free < _FULL_BYTES
    return False


def explain_full_disk(error: str) -> str:
    """Reword an error whose cause is a full disk, on one line with the cure."""
    return f"{os.strerror(errno.ENOSPC)} ({error}); {_FULL}"


def _is_unreadable(file: object) -> bool:
    """Whether this user may not even read an existing file, as another user's with the mode 0600."""
    return isinstance(file, str) and Path(file).exists() and not os.access(file, os.R_OK)
