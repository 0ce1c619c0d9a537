"""Progress of running commands: each publishes its own in logs/running/<pid>.json, `slimqwen watch` reads them all."""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
from pydantic import BaseModel, ValidationError

from slimqwen import redaction
from slimqwen.progress import Progress

_WRITE_INTERVAL_S = 0.25
_KEPT = 8  # latest activities of a command
_CLOCK_STEP_S = 10  # start times come from the wall clock, which may be set meanwhile


class Activity(BaseModel):
    """`done` of `total` (0: unknown), begun at `done_before`; times in Unix seconds."""

    done: float
    total: float
    done_before: float
    began: float
    updated: float

    def seconds_left(self, now: float) -> float | None:
        """Seconds that the rest takes at the pace so far, None while unknown."""
        gained = self.done - self.done_before
        if self.total <= 0 or gained <= 0:
            return None
        pace_s = (self.updated - self.began) / gained
        return max(0.0, (self.total - self.done) * pace_s - (now - self.updated))


class Work(BaseModel):
    """One running command, and its activities by name, the latest last."""

    pid: int
    process_started: float
    command: list[str]
    activities: dict[str, Activity] = {}

    def update(self, name: str, done: float, total: float) -> None:
        """Take in a progress report; an activity whose count has fallen is timed anew."""
        now, latest = time.time(), next(reversed(self.activities), None)
        activity = self.activities.pop(name, None)
        if activity is None or done < activity.done or (total == 0 and name != latest):
            activity = Activity(done=done, total=total, done_before=done, began=now, updated=now)
        self.activities[name] = activity.model_copy(update={"done": done, "total": total, "updated": now})
        for finished in list(self.activities)[:-_KEPT]:
            del self.activities[finished]


@contextlib.contextmanager
def publish(root: Path, command: Sequence[str]) -> Iterator[Progress]:
    """Publish the progress of this process while a `with` block lasts; a slow or full disk delays nothing."""
    process = psutil.Process()
    words, started = redaction.command(command), process.create_time()
    work = Work(pid=process.pid, process_started=started, command=words)
    file = _folder(root) / f"{work.pid}.json"
    changed, ended = threading.Event(), threading.Event()

    def report(name: str, done: float, total: float) -> None:
        work.update(name, float(done), float(total))
        changed.set()

    def write() -> None:
        while changed.wait() and not ended.is_set():
            changed.clear()
            # RuntimeError: a report came meanwhile, which is written next.
            with contextlib.suppress(OSError, RuntimeError):
                file.parent.mkdir(parents=True, exist_ok=True)
                part_file = file.with_suffix(".part")
                part_file.write_text(work.model_dump_json(), encoding="utf-8")
                part_file.replace(file)
            ended.wait(_WRITE_INTERVAL_S)
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)

    writer = threading.Thread(target=write, daemon=True)
    changed.set()
    with contextlib.suppress(RuntimeError):  # no more threads: nothing is published
        writer.start()
    try:
        yield report
    finally:
        ended.set()
        changed.set()
        if writer.ident is not None:
            writer.join(timeout=1)


def running(root: Path) -> list[Work]:
    """Running commands of a repository, the oldest first; files of processes that are gone are removed."""
    works = []
    for file in _folder(root).glob("*.json"):
        # The command may end meanwhile; files of another form stay.
        with contextlib.suppress(OSError, ValidationError):
            work = Work.model_validate_json(file.read_bytes())
            if file.stem != str(work.pid):
                continue
            try:
                started = psutil.Process(work.pid).create_time()
            except psutil.Error:
                started = float("-inf")  # the process has ended
            if abs(started - work.process_started) > _CLOCK_STEP_S:
                file.unlink()
            else:
                works.append(work)
    return sorted(works, key=lambda work: work.process_started)


def _folder(root: Path) -> Path:
    return root / "logs" / "running"
