"""Processes of tasks: an exception, a crash or a lack of memory there is a failure here.

A fresh process imports what its task needs. A forked one comes from a process that has imported vLLM already.
"""

import os
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from slimqwen.errors import SlimqwenError
from slimqwen.progress import Progress
from slimqwen.recipe import warm_worker, worker
from slimqwen.recipe.warm_worker import WarmWorker
from slimqwen.search.executors.task import Failure, Outcome, Result, Task
from slimqwen.serving import platform


class _Process:
    """Runs one task at a time, in a process that ends with this one."""

    def __init__(self, root: Path, progress: Progress, cpus: Collection[int] = ()) -> None:
        """Make a runner of tasks.

        Args:
            cpus: logical CPUs that the process may use; none for those of this process.
        """
        self._root, self._progress, self._cpus = root, progress, cpus
        self._open_resources = ExitStack()

    def close(self) -> None:
        """End the process, and with it a task that runs."""
        self._open_resources.close()


class FreshProcess(_Process):
    """A new process for each task; what the task prints goes to logs/task-<key>.log of the repository."""

    @property
    def messages(self) -> Connection:
        """Connection with the reports of the running task; readable when `receive` would not wait."""
        return self._messages

    def begin(self, task: Task) -> None:
        """Start a task; the one before must have ended."""
        self._task = task
        self._log = _log_folder(self._root) / f"task-{task.key[:40]}.log"
        output = self._open_resources.enter_context(self._log.open("wb"))
        with affinity(self._cpus):
            started = worker.started(os.environ, output)
            self._process, self._messages = self._open_resources.enter_context(started)
        with suppress(BrokenPipeError):  # `receive` reports that it has died
            worker.give(self._process, _call, self._root, self._log.parent, (task.function, task.argument))

    def receive(self) -> Outcome | None:
        """Take the task's next message; its outcome where it has ended."""
        try:
            kind, *content = self._messages.recv()
        except EOFError:
            cause = worker.death_cause(self._process.wait())
            reason = f"its process died ({cause}); its log is logs/{self._log.name}"
            self.close()
            return Failure(self._task.key, reason)
        if kind == "progress":
            self._progress(*content)
            return None
        worker.wait_for_end(self._process)
        self.close()
        return _outcome(self._task, kind, content[0])


class ForkedProcess(_Process):
    """A fork of one process that has imported vLLM for each task; what tasks print goes to logs/tasks.log.

    On a CPU the servers that tasks start are forks too (`slimqwen.serving.spawner`).
    """

    def __init__(self, root: Path, progress: Progress, cpus: Collection[int] = ()) -> None:
        super().__init__(root, progress, cpus)
        self._worker: WarmWorker | None = None

    @property
    def messages(self) -> Connection:
        """Connection with the reports of the running task; readable when `receive` would not wait."""
        assert self._worker is not None, "a task has begun"
        return self._worker.messages

    def begin(self, task: Task) -> None:
        """Start a task; the first one begins once vLLM is imported."""
        self._task = task
        self._kind, self._content = "failed", "its process died"
        if self._worker is None:
            self._worker = self._start_worker()
        with suppress(BrokenPipeError):  # `receive` reports that it has died
            self._worker.send(os.environ, _call, self._root, self._root, (task.function, task.argument))

    def _start_worker(self) -> WarmWorker:
        enter = self._open_resources.enter_context
        output = enter((_log_folder(self._root) / "tasks.log").open("ab"))
        environment, on_cpu = dict(os.environ), platform.detect() == "cpu"
        if on_cpu:
            environment |= platform.preloaded_libraries(environment)
        with affinity(self._cpus):
            return enter(warm_worker.started(environment, output, forks_servers=on_cpu))

    def receive(self) -> Outcome | None:
        """Take the task's next message; its outcome where its process has ended."""
        assert self._worker is not None, "a task has begun"
        try:
            kind, *content = self._worker.messages.recv()
        except EOFError:
            self.close()
            return Failure(self._task.key, "the process that tasks are forked from died")
        if kind == "ended":
            outcome = _outcome(self._task, self._kind, self._content)
            if isinstance(outcome, Failure) and content[0]:
                return replace(outcome, reason=f"{outcome.reason} (exit code {content[0]})")
            return outcome
        if kind == "progress":
            self._progress(*content)
        elif kind != "started":
            self._kind, self._content = kind, content[0]
        return None

    def close(self) -> None:
        """End the process that tasks are forked from, and a task that runs."""
        self._worker = None
        super().close()


def run(task: Task, root: Path, progress: Progress) -> Outcome:
    """Run a task in a fresh process to its end."""
    process = FreshProcess(root, progress)
    try:
        process.begin(task)
        while (outcome := process.receive()) is None:
            pass
        return outcome
    finally:
        process.close()


@contextmanager
def affinity(cpus: Collection[int]) -> Iterator[None]:
    """Restrict this thread and the processes that it starts in the block to CPUs; no CPUs restrict nothing."""
    if not cpus:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _log_folder(root: Path) -> Path:
    folder = root / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _call(root: Path, _: Path, job: tuple[Any, Any], progress: Progress) -> Any:
    function, argument = job
    return function(root, argument, progress)


def _outcome(task: Task, kind: str, content: Any) -> Outcome:
    if kind == "done":
        return Result(task.key, content)
    error = content if isinstance(content, SlimqwenError) else None
    return Failure(task.key, " ".join(str(content).split()), error)
