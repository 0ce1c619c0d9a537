"""What a stage's process reports of a failure."""

import errno
import re
from multiprocessing import Pipe

import pytest

from slimqwen.processes import worker

FULL = OSError(errno.ENOSPC, "No space left on device", "/store/model.safetensors")


def test_what_fails_on_a_full_disk_says_so_whatever_its_own_words_are(tmp_path, monkeypatch):
    def stage(*_):
        raise RuntimeError("unexpected pos 64 vs 0")  # torch.save

    monkeypatch.setattr(worker, "is_full", lambda folder: folder == tmp_path)
    ours, theirs = Pipe()
    worker.perform((tmp_path, stage, ()), theirs)
    cause = "RuntimeError: unexpected pos 64 vs 0"
    assert ours.recv() == ("failed", f"No space left on device ({cause}); free some disk space")


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (3, "exit code 3"),
        (-9, "SIGKILL, as when memory runs out"),
        (-7, "SIGBUS, as when /dev/shm or the disk is full"),
        (-11, "SIGSEGV"),
    ],
)
def test_a_death_has_its_likely_reason(code, text):
    assert worker.death_cause(code) == text


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (FULL, "/store/model.safetensors: No space left on device; free some disk space"),
        (
            RuntimeError("IO Error: No space left on device (os error 28)"),
            "IO Error: .*; free some disk space",
        ),
        (OSError(errno.EMFILE, "Too many open files"), "Too many open files; allow more open files, such as"),
        (ValueError("two\nlines"), "^ValueError: two lines$"),
    ],
)
def test_a_failure_is_one_line_with_its_cure(tmp_path, monkeypatch, error, text):
    def stage(*_):
        raise error

    def cannot_print():
        raise FULL

    monkeypatch.setattr(worker.traceback, "print_exc", cannot_print)  # the log lies on the disk that is full
    ours, theirs = Pipe()
    worker.perform((tmp_path, stage, ()), theirs)
    kind, message = ours.recv()
    assert kind == "failed"
    assert re.search(text, message)
