"""Functions that tests hand to executors; a worker imports them by name."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from slimqwen.errors import SlimqwenError
from slimqwen.progress import Progress


def double(root: Path, number: int, progress: Progress) -> int:
    progress("doubling", 1, 1)
    return 2 * number


def refuse(root: Path, reason: str, progress: Progress) -> None:
    raise SlimqwenError(reason)


def raise_defect(root: Path, _: Any, progress: Progress) -> None:
    raise ValueError("a\ndefect")


def crash(root: Path, _: Any, progress: Progress) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def sleep(root: Path, seconds: float, progress: Progress) -> float:
    """Leave the process id in a file, then sleep."""
    with (root / "pids.txt").open("a") as stream:
        stream.write(f"{os.getpid()}\n")
    progress("sleeping", 0, seconds)
    time.sleep(seconds)
    return seconds


def interrupt_parent(root: Path, _: Any, progress: Progress) -> None:
    """Do what Ctrl-C does to the process that waits, then outlive it."""
    (root / "pid.txt").write_text(str(os.getpid()))
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(60)


def threads(root: Path, _: Any, progress: Progress) -> str | None:
    return os.environ.get("OMP_NUM_THREADS")
