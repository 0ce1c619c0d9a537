"""File locks between processes. The kernel releases a lock when the last process that holds it ends, even if killed."""

import contextlib
import errno
import fcntl
import os
import pwd
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

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
            progress(f"waiting: {reason}{describe_holders(file)}", 0, 0)
            take_lock(stream, file, shared=shared, wait=True)
        yield


def take_lock(stream: IO[Any], file: Path, *, shared: bool = False, wait: bool = False) -> bool:
    """Lock an open file until it is closed; return False if another process holds the lock.

    Args:
        stream: the file, open for reading and writing.
        file: path of `stream`, for the error message.
        shared: whether other processes that ask for a shared lock may hold it at the same time.
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


class Lock(NamedTuple):
    """A lock that a process of this host holds or waits for.

    Attributes:
        pid: the process.
        file: device and inode of the locked file.
        is_waiting: whether the process waits for the lock; if not, it holds it.
    """

    pid: int
    file: tuple[int, int]
    is_waiting: bool


_ROW = re.compile(r"\d+: (-> )?FLOCK\s+\S+\s+\S+\s+(\d+) ([0-9a-f]+):([0-9a-f]+):(\d+) ")


def list_locks() -> list[Lock]:
    """List the file locks of this host's processes; those of other hosts and PID namespaces are not visible."""
    with contextlib.suppress(OSError):
        rows = (_ROW.match(line) for line in Path("/proc/locks").read_text().splitlines())
        return [
            Lock(int(row[2]), (os.makedev(int(row[3], 16), int(row[4], 16)), int(row[5])), bool(row[1]))
            for row in rows
            if row
        ]
    return []


def describe_holders(file: Path) -> str:
    """Who holds the lock of a file, such as " (process 12 of alice)"; empty if the kernel does not show it."""
    found = identify(file)
    holders = {lock.pid for lock in list_locks() if lock.file == found and not lock.is_waiting} - {
        0,
        os.getpid(),
    }
    names = [
        f"process {pid} of {owner}" if (owner := name_owner(pid)) else f"process {pid}, which has ended"
        for pid in sorted(holders)
    ]
    return f" ({', '.join(names)})" if names else ""


def identify(file: Path) -> tuple[int, int] | None:
    """Device and inode of a file; None if it is not there."""
    with contextlib.suppress(OSError):
        stat = file.stat()
        return stat.st_dev, stat.st_ino
    return None


def name_owner(pid: int) -> str | None:
    """Name of the user who runs a process, or the user id where it has no name; None once the process has ended."""
    try:
        owner = Path(f"/proc/{pid}").stat().st_uid
        return pwd.getpwuid(owner).pw_name
    except OSError:
        return None
    except KeyError:
        return f"uid {owner}"
