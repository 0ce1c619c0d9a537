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


def meet(root: Path, name: str, progress: Progress) -> tuple[str, set[int]]:
    """Wait at most 300 s for another task that is here too; its name and the CPUs with which this process began."""
    cpus = os.sched_getaffinity(0)
    (root / f"{name}.here").touch()
    for _ in range(3000):
        if others := [path.stem for path in root.glob("*.here") if path.stem != name]:
            return others[0], cpus
        time.sleep(0.1)
    return "", cpus


def await_cpus(root: Path, count: int, progress: Progress) -> int:
    """Wait at most 60 s until this process may use so many CPUs; how many it may use."""
    for _ in range(600):
        if len(os.sched_getaffinity(0)) == count:
            break
        time.sleep(0.1)
    return len(os.sched_getaffinity(0))


def hold(root: Path, name: str, progress: Progress) -> str:
    """Leave the process id in a file, then wait until there is a file named go, 60 s at most."""
    with (root / "pids.txt").open("a") as stream:
        stream.write(f"{os.getpid()}\n")
    for _ in range(600):
        if (root / "go").is_file():
            break
        time.sleep(0.1)
    return name


def look_beside(root: Path, name: str, progress: Progress) -> tuple[list[str], set[int]]:
    """Names of the tasks that run beside this one within half a second; this process's CPUs."""
    file = root / f"{name}.running"
    file.touch()
    time.sleep(0.5)
    beside = sorted(path.stem for path in root.glob("*.running") if path != file)
    file.unlink()
    return beside, os.sched_getaffinity(0)


def interrupt(root: Path, waiting: tuple[int, int], progress: Progress) -> None:
    """Do what Ctrl-C does to the process that waits once so many other tasks run, then outlive it."""
    pid, others = waiting
    while others and not (root / "pids.txt").is_file():
        time.sleep(0.05)
    (root / "pid.txt").write_text(str(os.getpid()))
    os.kill(pid, signal.SIGINT)
    time.sleep(60)


def threads(root: Path, _: Any, progress: Progress) -> str | None:
    return os.environ.get("OMP_NUM_THREADS")
