"""Gates of a sweep whose measurements are stand-ins in this process."""

from slimqwen.progress import silent
from slimqwen.search.executors import Failure, Outcome, Result, Task
from tests.search.sweep.test_driver import Nodes

QUESTIONS = 1200


def question(number: int) -> str:
    """Text of a question, by which it is on one side of the split."""
    return f"question {number}"


class InProcess(Nodes):
    """An executor that calls each function in this process; tasks with `broken` in their title fail."""

    def wait(self) -> Outcome:
        task: Task = self.waiting.popleft()
        self.ran.append(task)
        if self.broken and self.broken in task.title:
            return Failure(task.key, "its process died (SIGSEGV)")
        value = task.function(self.root, task.argument, silent)
        return Result(task.key, value)
