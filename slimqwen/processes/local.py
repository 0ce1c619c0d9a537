"""The local executor: runs tasks on this machine, one after another or several at a time, each on its own CPUs."""

import os
from collections import deque
from collections.abc import Collection
from multiprocessing import connection
from pathlib import Path
from typing import Self

from slimqwen import host
from slimqwen.processes.task import ENGINE_BYTES, ExecutorError, Outcome, Task
from slimqwen.processes.task_process import TaskProcess
from slimqwen.progress import Progress, progress_of, silent

_DEFAULT_MAX_WIDTH = 4
"""Largest default number of tasks at a time: with more, a search's sampler would see too few results per proposal."""

_ALONE = -1
"""Lane with every CPU, for a task that must run alone."""


def default_width() -> int:
    """Default number of tasks at a time on this machine: one for each core; one if engines run on a GPU."""
    return 1 if host.detect() == "cuda" else min(_DEFAULT_MAX_WIDTH, host.physical_cores())


class LocalExecutor:
    """Runs tasks in the order in which they were submitted, each in a lane: a set of CPUs for one task at a time.

    A task that needs the whole node or a GPU runs alone; others start only if their memory fits beside running tasks.
    """

    def __init__(
        self, root: Path, progress: Progress = silent, *, warm: bool = False, width: int = 1
    ) -> None:
        """Make an executor for a repository.

        Args:
            progress: receives the progress of the running tasks; the task's title is put before the activity.
            warm: whether tasks are forks of processes that have imported vLLM.
            width: largest number of tasks that run at a time.
        """
        self._root, self._progress, self._warm, self._width = root, progress, warm, width
        self._waiting: deque[Task] = deque()
        self._running: dict[int, Task] = {}
        self._processes: dict[int, TaskProcess] = {}

    def __enter__(self) -> Self:
        """Return the executor; processes are started with the first task."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the running tasks and drop those that have not begun."""
        self._waiting.clear()
        self._running.clear()
        for process in self._processes.values():
            process.close()
        self._processes.clear()

    @property
    def width(self) -> int:
        """Largest number of tasks that run at a time."""
        return self._width

    def submit(self, task: Task) -> None:
        """Queue a task, an urgent one in front; it is ignored if a task with its key is pending already."""
        if all(task.key != other.key for other in (*self._waiting, *self._running.values())):
            if task.urgent:
                self._waiting.appendleft(task)
            else:
                self._waiting.append(task)

    def wait(self) -> Outcome:
        """Wait for the next task that ends, and return its outcome.

        Raises:
            ExecutorError: no task is pending.
        """
        if not (self._waiting or self._running):
            raise ExecutorError("no task is pending; submit one before waiting for its outcome")
        while True:
            self._begin_tasks()
            ready = connection.wait([self._processes[lane].messages for lane in self._running])
            for lane in [each for each in self._running if self._processes[each].messages in ready]:
                outcome = self._processes[lane].receive()
                if outcome is not None:
                    self._progress(f"{self._running.pop(lane).title}: ended", 1, 1)
                    return outcome

    def _begin_tasks(self) -> None:
        """Start queued tasks in their order while a lane and enough memory are free."""
        while self._waiting and (lane := self._find_free_lane(self._waiting[0])) is not None:
            task = self._running[lane] = self._waiting.popleft()
            if task.resources.memory_bytes > host.available_memory():
                self._end_idle_processes()
            self._process(lane).begin(task, progress_of(task.title, self._progress))
        # A task that waits beside a single running one waits for its end: for memory, or to run alone.
        is_last = not self._waiting or len(self._running) == 1
        if is_last and 1 < self._width > len(self._running) and _ALONE not in self._running:
            self._use_idle_cores()

    def _end_idle_processes(self) -> None:
        """End the processes without a task; a later task of their lane starts them again."""
        for lane in self._processes.keys() - self._running.keys():
            self._processes.pop(lane).close()

    def _use_idle_cores(self) -> None:
        """Give the last tasks every core, and start the process of tasks that run alone, one of which often follows.

        Where memory may not suffice for all of them, idle processes are ended instead.
        """
        if self._memory_of_tasks() + ENGINE_BYTES > host.available_memory():
            self._end_idle_processes()
        elif self._warm:
            self._process(_ALONE).start()
        for lane in self._running:
            self._processes[lane].use_every_cpu()

    def _process(self, lane: int) -> TaskProcess:
        if lane not in self._processes:
            self._processes[lane] = TaskProcess(self._root, self._cpus(lane), warm=self._warm)
        return self._processes[lane]

    def _find_free_lane(self, task: Task) -> int | None:
        """A lane in which a task can begin now; None if it has to wait."""
        runs_alone = self._width > 1 and bool(task.resources.whole_node or task.resources.gpus)
        if not self._running:
            return _ALONE if runs_alone else 0
        needed = self._memory_of_tasks() + task.resources.memory_bytes
        if runs_alone or _ALONE in self._running or needed > host.total_memory():
            return None
        return next((lane for lane in range(self._width) if lane not in self._running), None)

    def _memory_of_tasks(self) -> int:
        """Bytes that the running tasks need."""
        return sum(task.resources.memory_bytes for task in self._running.values())

    def _cpus(self, lane: int) -> Collection[int]:
        """CPUs of a lane, as many as each other lane has; empty if the lane may use every CPU."""
        if self._width == 1 or lane == _ALONE:
            return ()
        cpus = sorted(os.sched_getaffinity(0))
        return cpus[lane :: self._width][: max(1, len(cpus) // self._width)]
