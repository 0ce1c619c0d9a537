"""An executor that calls the function of each task in this process, one after another."""

from collections import deque
from pathlib import Path
from typing import Self

from slimqwen.processes import Failure, Outcome, Result, Task
from slimqwen.progress import silent


class InProcess:
    """Attributes:
    ran: the tasks that ended, in their order.
    broken: a task with this in its title dies.
    """

    def __init__(self, root: Path, *, interrupt_after: int | None = None) -> None:
        self.root, self._interrupt_after = root, interrupt_after
        self.waiting: deque[Task] = deque()
        self.ran: list[Task] = []
        self.broken: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.waiting.clear()

    @property
    def width(self) -> int:
        return 1

    def submit(self, task: Task) -> None:
        if all(task.key != other.key for other in self.waiting):
            self.waiting.append(task)

    def wait(self) -> Outcome:
        if len(self.ran) == self._interrupt_after:
            raise KeyboardInterrupt
        task = self.waiting.popleft()
        self.ran.append(task)
        if self.broken and self.broken in task.title:
            return Failure(task.key, "its process died (SIGSEGV)")
        return self.outcome(task)

    def outcome(self, task: Task) -> Outcome:
        return Result(task.key, task.function(self.root, task.argument, silent))
