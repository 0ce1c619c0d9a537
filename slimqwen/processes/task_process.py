"""Processes of tasks: an exception, a crash or a lack of memory in a task's process becomes a Failure."""

import os
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from slimqwen import host
from slimqwen.errors import SlimqwenError
from slimqwen.processes import warm_worker, worker
from slimqwen.processes.task import Failure, Outcome, Result, Task
from slimqwen.processes.warm_worker import WarmWorker
from slimqwen.progress import Progress

_LOG = Path("logs") / "tasks.log"


class TaskProcess:
    """Runs one task at a time, each in a fork of one starter process, which ends when this process ends.

    The output of tasks goes to logs/tasks.log of the repository.
    """

    def __init__(self, root: Path, cpus: Collection[int] = (), *, warm: bool = False) -> None:
        """Make a runner of tasks.

        Args:
            cpus: logical CPUs that tasks may use; empty for those of this process.
            warm: whether the starter has imported vLLM, so that tasks and, on a CPU, their servers need not.
        """
        self._root, self._cpus, self._warm = root, cpus, warm
        self._open_resources = ExitStack()
        self._worker: WarmWorker | None = None
        self._outcome: Outcome | None = None
        self._is_restricted = False
        self._pid: int | None = None

    @property
    def messages(self) -> Connection:
        """Connection that carries the reports of the running task; if it is readable, `receive` does not block."""
        assert self._worker is not None, "a task has begun"
        return self._worker.messages

    def begin(self, task: Task, progress: Progress) -> None:
        """Start a task, whose reports `receive` passes to `progress`; the previous task must have ended."""
        self._task, self._progress, self._outcome = task, progress, None
        self._is_restricted, self._pid = bool(self._cpus), None
        self.start()
        assert self._worker is not None
        with suppress(BrokenPipeError):  # `receive` reports the death of the process
            self._worker.send(os.environ, self._root, task.function, self._root, task.argument)

    def start(self) -> None:
        """Start the starter process, unless it runs; it imports what tasks need while this process goes on."""
        if self._worker is None:
            self._worker = self._start_worker()

    def use_every_cpu(self) -> None:
        """Let the running task use every CPU of this process, not only those given to the constructor."""
        if not self._is_restricted or self._pid is None:
            return
        self._is_restricted = False
        every = os.sched_getaffinity(0)
        with suppress(psutil.Error):  # the task has ended
            task = psutil.Process(self._pid)
            for process in (task, *task.children(recursive=True)):
                for thread in process.threads():
                    with suppress(ProcessLookupError):
                        os.sched_setaffinity(thread.id, every)

    def _start_worker(self) -> WarmWorker:
        (self._root / _LOG).parent.mkdir(parents=True, exist_ok=True)
        output = self._open_resources.enter_context((self._root / _LOG).open("ab"))
        environment, forks_servers = dict(os.environ), self._warm and host.detect() == "cpu"
        if forks_servers:
            environment |= host.preloaded_libraries(environment)
        with _affinity(self._cpus):
            return self._open_resources.enter_context(
                warm_worker.started(environment, output, forks_servers=forks_servers, imports=self._warm)
            )

    def receive(self) -> Outcome | None:
        """Handle the task's next message; returns the outcome once the task's process has ended, else None."""
        key = self._task.key
        try:
            kind, *content = self.messages.recv()
        except EOFError:
            self.close()
            return Failure(key, f"the process that forks tasks died; read why in its log: {_LOG}")
        if kind == "started":
            self._pid = content[0]
        elif kind == "progress":
            self._progress(*content)
        elif kind == "done":
            self._outcome = Result(key, content[0])
        elif kind in ("refused", "failed"):
            error = content[0] if isinstance(content[0], SlimqwenError) else None
            self._outcome = Failure(key, " ".join(str(content[0]).split()), error)
        elif kind == "ended":
            cause = worker.death_cause(content[0])
            return self._outcome or Failure(key, f"its process died ({cause}); read why in its log: {_LOG}")
        return None

    def close(self) -> None:
        """End the starter process and the running task."""
        self._worker = None
        self._open_resources.close()


def run_task(task: Task, root: Path, progress: Progress) -> Outcome:
    """Run a task to its end in a process of its own, and return its outcome: a `Failure` if it raised or died."""
    process = TaskProcess(root)
    try:
        process.begin(task, progress)
        while (outcome := process.receive()) is None:
            pass
        return outcome
    finally:
        process.close()


@contextmanager
def _affinity(cpus: Collection[int]) -> Iterator[None]:
    """Restrict this thread, and processes that it starts in the block, to `cpus`; no restriction if that is empty."""
    if not cpus:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
