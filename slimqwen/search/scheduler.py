"""The scheduler of a search: each task runs once, however often it is asked for or the run interrupted."""

from slimqwen.records.journal import Journal
from slimqwen.search.executors import Executor, Failure, Outcome, Result, Task


class Scheduler:
    """Tasks of an executor by key; the values of those that ended well are kept in a journal."""

    def __init__(self, executor: Executor, journal: Journal) -> None:
        """Make a scheduler.

        Args:
            executor: entered already.
        """
        self._executor, self._journal = executor, journal
        self._waiting: set[str] = set()
        self._outcomes: dict[str, Outcome] = {}

    @property
    def is_waiting(self) -> bool:
        """Whether a task was submitted and has not ended."""
        return bool(self._waiting)

    def ask(self, task: Task) -> Outcome | None:
        """The outcome of a task, of this run or an earlier one; where there is none, submits the task once."""
        if task.key not in self._outcomes and (value := self._journal.get(task.key)) is not None:
            self._outcomes[task.key] = Result(task.key, value)
        if task.key not in self._outcomes and task.key not in self._waiting:
            self._executor.submit(task)
            self._waiting.add(task.key)
        return self._outcomes.get(task.key)

    def wait(self) -> None:
        """Take the outcome of the next task that ends."""
        outcome = self._executor.wait()
        self._waiting.discard(outcome.key)
        self._outcomes[outcome.key] = outcome
        if not isinstance(outcome, Failure) and outcome.value is not None:  # None: a stage is in the store
            self._journal.add(outcome.key, outcome.value)
