"""The local executor: tasks run on this machine, one after another in the order in which they were submitted."""

import os
from collections import deque
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from slimqwen.progress import Progress, silent
from slimqwen.recipe import warm_worker
from slimqwen.recipe.warm_worker import WarmWorker
from slimqwen.search import SearchError
from slimqwen.search.executors import process
from slimqwen.search.executors.task import Outcome, Task


class LocalExecutor:
    """Runs each task alone, which `Resources.whole_node` asks for and a measurement wants."""

    def __init__(self, root: Path, progress: Progress = silent, *, warm: bool = False) -> None:
        """Make an executor for a repository.

        Args:
            root: the repository.
            progress: receives the progress of the running task, its title before the activity.
            warm: whether tasks are forks of one process that has imported vLLM.
        """
        self._root, self._progress, self._warm = root, progress, warm
        self._waiting: deque[Task] = deque()
        self._opened = ExitStack()
        self._worker: WarmWorker | None = None

    def __enter__(self) -> Self:
        """Nothing has to be started before the first task."""
        return self

    def __exit__(self, *_: object) -> None:
        """Forget the tasks that have not begun; a running one was stopped by what interrupted `wait`."""
        self._waiting.clear()
        self._worker = None
        self._opened.close()

    @property
    def pending(self) -> int:
        """Number of tasks that have not begun."""
        return len(self._waiting)

    def submit(self, task: Task) -> None:
        """Append a task; one whose key is pending already is ignored."""
        if all(task.key != other.key for other in self._waiting):
            self._waiting.append(task)

    def wait(self) -> Outcome:
        """Run the next task to its end.

        Raises:
            SearchError: no task is pending.
        """
        if not self._waiting:
            raise SearchError("no task is pending; submit one before waiting for its outcome")
        task = self._waiting.popleft()

        def report(activity: str, done: float, total: float) -> None:
            self._progress(f"{task.title}: {activity}", done, total)

        if not self._warm:
            return process.run(task, self._root, report)
        if self._worker is None:
            log = self._root / "logs" / "tasks.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            output = self._opened.enter_context(log.open("ab"))
            self._worker = self._opened.enter_context(warm_worker.started(os.environ, output))
        return process.run_forked(task, self._root, self._worker, report)
