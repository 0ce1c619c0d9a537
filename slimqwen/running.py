"""What runs now: each process that works for long says how far it is in a file of its own, logs/running/<pid>.json.

Who works publishes, who watches finds. Publishing is a courtesy: a thread writes, at most every `INTERVAL_S`, and where
nothing can be written there is no file, and the work goes on.
"""

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
from pydantic import BaseModel, ValidationError

from slimqwen import redaction
from slimqwen.progress import Progress

INTERVAL_S = 0.25
"""The shortest time between two writes of a file."""

_KEPT = 20  # activities in a file: those last told of
_SHOWN = 7  # of those that wait for their next turn
_CLOCK_STEP_S = 10  # start times are read off the wall clock, which may be set right meanwhile


class Activity(BaseModel):
    """One thing that a process does, or did.

    Attributes:
        name: as its progress is told.
        done: how much is done.
        total: of how much, in the same unit; 0 while unknown.
        done_before: how much was done when it began; not 0 for what goes on after an interruption.
        began: Unix time, seconds.
        told: Unix time of the last word about it, seconds.
    """

    name: str
    done: float
    total: float
    done_before: float
    began: float
    told: float

    @property
    def over(self) -> bool:
        """Whether all of it is done."""
        return 0 < self.total <= self.done

    def seconds_left(self, now: float) -> float | None:
        """The seconds that the rest takes at the pace until now; None while nothing can be said.

        Args:
            now: Unix time, seconds.
        """
        gained = self.done - self.done_before
        if self.total <= 0 or gained <= 0:
            return None
        pace_s = (self.told - self.began) / gained
        return max(0.0, (self.total - self.done) * pace_s - (now - self.told))


class Work(BaseModel):
    """What one process does.

    Attributes:
        pid: of the process.
        process_started: Unix time, seconds; tells it from a later process of the same number.
        command: what was called, the program first, without secrets.
        variants: those that the command names.
        began: Unix time, seconds.
        activities: in the order in which they were last told of, the latest last.
    """

    pid: int
    process_started: float
    command: list[str]
    variants: list[str]
    began: float
    activities: list[Activity]

    @property
    def current(self) -> list[Activity]:
        """What it is at: the activity last told of, after the others that have a known end and are not over."""
        others = [one for one in self.activities[:-1] if one.total > 0 and not one.over]
        return others[-_SHOWN:] + self.activities[-1:]


@contextlib.contextmanager
def publishing(root: Path, command: Sequence[str]) -> Iterator[Progress]:
    """Publish the progress of this process while a `with` block lasts.

    Args:
        root: the repository.
        command: what was called, the program first; `--variant` names variants. Its secrets are not published.
    """
    after = itertools.islice(itertools.dropwhile(lambda word: word != "--variant", command), 1, None)
    process = psutil.Process()
    work = Work(
        pid=process.pid,
        process_started=process.create_time(),
        command=redaction.command(command),
        variants=list(itertools.takewhile(lambda word: not word.startswith("-"), after)),
        began=time.time(),
        activities=[],
    )
    publisher = _Publisher(_folder(root), work)
    try:
        yield publisher.tell
    finally:
        publisher.end()


def find(root: Path) -> list[Work]:
    """The work that goes on in a repository, the oldest first; removes the files of processes that are gone.

    Files that are not of this kind are left alone.

    Args:
        root: the repository.
    """
    found = []
    for file in sorted(_folder(root).glob("*.json*")):
        pid = file.name.partition(".")[0]
        if not pid.isdecimal():
            continue
        started = _process_started(int(pid))
        # It ended meanwhile, its file cannot be removed, or it is some other file.
        with contextlib.suppress(OSError, ValidationError):
            if started is None:
                file.unlink()
                continue
            work = Work.model_validate_json(file.read_bytes())
            if work.pid != int(pid) or file.suffix != ".json":
                continue
            if abs(work.process_started - started) > _CLOCK_STEP_S:
                file.unlink()
                continue
            found.append(work)
    return sorted(found, key=lambda work: work.began)


def _folder(root: Path) -> Path:
    return root / "logs" / "running"


def _process_started(pid: int) -> float | None:
    """The Unix time, in seconds, at which a process started; None where it is gone."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None


class _Publisher:
    """Notes what is told, and has a thread write it: a slow disk is none of the work's business."""

    def __init__(self, folder: Path, work: Work) -> None:
        self._file, self._work = folder / f"{work.pid}.json", work
        self._activities: dict[str, Activity] = {}
        self._lock, self._changed, self._ended = threading.Lock(), threading.Event(), threading.Event()
        self._changed.set()
        self._thread = threading.Thread(target=self._write_on, daemon=True)
        with contextlib.suppress(RuntimeError):  # no more threads: no file
            self._thread.start()

    def tell(self, name: str, done: float, total: float) -> None:
        """Note how far an activity is."""
        done, total, now = float(done), float(total), time.time()
        with self._lock:
            latest = next(reversed(self._activities), None)
            one = self._activities.pop(name, None)
            # Two stages may both be "loading", and servers start one after the other: these begin anew.
            if one is None or done < one.done or (total == 0 and name != latest):
                one = Activity(name=name, done=done, total=total, done_before=done, began=now, told=now)
            one.done, one.total, one.told = done, total, now
            self._activities[name] = one  # the last one of the dictionary
            if len(self._activities) > _KEPT:
                del self._activities[next(iter(self._activities))]
        self._changed.set()

    def end(self) -> None:
        """Write no more, and remove the file."""
        self._ended.set()
        self._changed.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=1)
        with contextlib.suppress(OSError):
            self._file.unlink(missing_ok=True)
            self._part.unlink(missing_ok=True)

    @property
    def _part(self) -> Path:
        return self._file.with_name(f"{self._file.name}.part")

    def _write_on(self) -> None:
        while self._changed.wait() and not self._ended.is_set():
            self._changed.clear()
            with self._lock:
                self._work.activities = list(self._activities.values())
                content = self._work.model_dump_json()
            with contextlib.suppress(OSError):
                self._file.parent.mkdir(parents=True, exist_ok=True)
                self._part.write_text(content, encoding="utf-8")
                self._part.replace(self._file)
            self._ended.wait(INTERVAL_S)
