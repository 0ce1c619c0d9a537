"""File locks between processes. The kernel releases a lock when the last process that holds it ends, even if killed."""

import contextlib
import errno
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from slimqwen.errors import SlimqwenError
from slimqwen.progress import Progress, silent

_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)


class FileLockError(SlimqwenError):
    """The file system has no locks."""


@contextlib.contextmanager
def hold_lock(
    file: Path, *, shared: bool = False, reason: str = "", progress: Progress = silent
) -> Iterator[None]:
    """Hold the lock of a file for the length of a `with` block; first wait until other processes release it.

    Args:
        file: made if missing, with its folder.
        shared: whether other processes that ask for a shared lock may hold it at the same time.
        reason: why another process may hold the lock; `progress` shows it during the wait.

    Raises:
        FileLockError: the file system has no locks.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    # NFS grants a shared lock only on a file open for reading, an exclusive one only on a file open for writing.
    with file.open("a+b") as stream:
        if not take_lock(stream, file, shared=shared):
            progress(f"waiting: {reason}", 0, 0)
            take_lock(stream, file, shared=shared, wait=True)
        yield


def take_lock(stream: IO[Any], file: Path, *, shared: bool = False, wait: bool = False) -> bool:
    """Lock an open file until it is closed; return False if another process holds the lock.

    Args:
        stream: the file, open for reading and writing.
        file: path of `stream`, for the error message.
        wait: whether to wait until the other process releases the lock.

    Raises:
        FileLockError: the file system has no locks.
    """
    try:
        fcntl.flock(stream, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        raise FileLockError(
            f"{file.parent} is on a file system without locks ({error.strerror}), where two commands at once would "
            "write the same files; move the checkout to a local disk, or mount that file system with locks"
        ) from error
    return True
