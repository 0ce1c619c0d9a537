"""Locks of files between processes; the kernel drops one with the last process that holds it, however that ends."""

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
    """Hold the lock of a file for the length of a `with` block, after every process that holds it now.

    Args:
        file: made if missing, as is its folder.
        shared: whether others may hold it at the same time, if they share it too.
        reason: why another process may hold it, for the progress of a lock that has to wait.

    Raises:
        FileLockError: the file system has no locks.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    # NFS takes a shared lock on a readable file alone, and an exclusive one on a writable file alone.
    with file.open("a+b") as stream:
        if not take_lock(stream, file, shared=shared):
            progress(f"waiting: {reason}", 0, 0)
            take_lock(stream, file, shared=shared, wait=True)
        yield


def take_lock(stream: IO[Any], file: Path, *, shared: bool = False, wait: bool = False) -> bool:
    """Lock an open file until it is closed; False where another process holds its lock.

    Args:
        stream: open for reading and writing.
        file: its path, for the error.
        wait: wait for that other process.

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
