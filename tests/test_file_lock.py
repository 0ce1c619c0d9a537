"""Locks between processes, and file systems without them."""

import errno
import fcntl
import os
import pwd
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from slimqwen import file_lock
from slimqwen.file_lock import FileLockError, Lock, describe_holders, hold_lock, identify, take_lock


def is_free(file: Path, *, shared: bool = False) -> bool:
    with file.open("a+b") as stream:
        return take_lock(stream, file, shared=shared)


def test_a_lock_excludes_others_until_its_block_ends(tmp_path: Path) -> None:
    file = tmp_path / "new" / ".lock"
    with hold_lock(file):
        assert not is_free(file)
        assert not is_free(file, shared=True)
    assert is_free(file)


def test_a_shared_lock_excludes_only_an_exclusive_one(tmp_path: Path) -> None:
    with hold_lock(tmp_path / ".lock", shared=True):
        assert is_free(tmp_path / ".lock", shared=True)
        assert not is_free(tmp_path / ".lock")


def test_one_that_waits_says_why_and_goes_on_when_the_other_ends(tmp_path: Path) -> None:
    said, entered = threading.Event(), threading.Event()
    shown: list[str] = []

    def wait() -> None:
        def progress(activity: str, done: float, total: float) -> None:
            shown.append(activity)
            said.set()

        with hold_lock(tmp_path / ".lock", reason="another run", progress=progress):
            entered.set()

    other = threading.Thread(target=wait)
    with hold_lock(tmp_path / ".lock"):
        other.start()
        assert said.wait(60)
        assert not entered.is_set()
    other.join()
    assert (shown, entered.is_set()) == (["waiting: another run"], True)


def test_another_process_that_holds_a_lock_is_named_with_its_owner(tmp_path: Path) -> None:
    file = tmp_path / ".lock"
    code = "import sys; from pathlib import Path; from slimqwen.file_lock import hold_lock\n"
    code += "with hold_lock(Path(sys.argv[1])): print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout
        other.stdout.readline()
        owner = pwd.getpwuid(os.getuid()).pw_name
        assert describe_holders(file) == f" (process {other.pid} of {owner})"
        other.communicate("")
    assert describe_holders(file) == describe_holders(tmp_path / "none") == ""


def test_a_process_that_ended_is_no_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root's own files may belong to a user called nobody."""
    file = tmp_path / ".lock"
    file.touch()
    found = identify(file)
    assert found
    with subprocess.Popen([sys.executable, "-c", ""]) as other:
        other.wait()
    monkeypatch.setattr(file_lock, "list_locks", lambda: [Lock(other.pid, found, False)])
    assert describe_holders(file) == f" (process {other.pid}, which has ended)"


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named_with_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def flock(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    with (
        pytest.raises(
            FileLockError, match=f"{tmp_path} is on a file system without locks .*; move the checkout"
        ),
        hold_lock(tmp_path / ".lock"),
    ):
        pass


def test_a_lock_can_be_taken_where_the_kernel_asks_for_the_access_that_nfs_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS: a shared lock on a descriptor that can be read, an exclusive one on one that can be written."""
    stock = fcntl.flock

    def flock(stream: object, operation: int) -> None:
        access = fcntl.fcntl(stream, fcntl.F_GETFL) & os.O_ACCMODE
        if access == (os.O_WRONLY if operation & fcntl.LOCK_SH else os.O_RDONLY):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        stock(stream, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    for shared in (True, False):
        with hold_lock(tmp_path / ".lock", shared=shared):
            assert not is_free(tmp_path / ".lock")
