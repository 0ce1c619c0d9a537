"""Tasks, their outcomes, and the interface of an executor.

A task consists of a function that can be imported by name and an argument that can be pickled. It runs in a process of
its own, so a crash of vLLM is a failure of the task and never of its caller.

    with LocalExecutor(root, progress) as executor:
        executor.submit(Task("key", "title", function, argument))
        outcome = executor.wait()  # Result or Failure
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from slimqwen.errors import SlimqwenError
from slimqwen.progress import Progress

ENGINE_BYTES = 3 << 30
"""Resident memory of the processes of vLLM and of a measurement, bytes, without weights and KV cache."""


class ExecutorError(SlimqwenError):
    """Tasks cannot run; the message says why and what to do."""


@dataclass(frozen=True)
class Resources:
    """Resources of a node that a task needs.

    Attributes:
        gpus: number of GPUs.
        memory_bytes: main memory, bytes; 0 if unknown.
        whole_node: whether no other task may run beside it, as for a timing.
    """

    gpus: int = 0
    memory_bytes: int = 0
    whole_node: bool = False


@dataclass(frozen=True)
class Task:
    """A unit of work; a second run must give the same value and leave the same files.

    Attributes:
        key: content key; while a task is pending, another one with the same key is ignored.
        title: name in progress displays and messages.
        function: function(root, argument, progress) -> value, importable by name; root is the repository.
        argument: any value that can be pickled.
        urgent: whether it begins before tasks that wait already, because other tasks need its output.
    """

    key: str
    title: str
    function: Callable[[Path, Any, Progress], Any]
    argument: Any
    resources: Resources = Resources()
    urgent: bool = False


@dataclass(frozen=True)
class Result:
    """The outcome of a task that succeeded, with the value of its function."""

    key: str
    value: Any


@dataclass(frozen=True)
class Failure:
    """The outcome of a task that raised or died.

    Attributes:
        reason: the reason in one line.
        error: the expected error that the function raised; None for any other exception or a death.
    """

    key: str
    reason: str
    error: SlimqwenError | None = None


Outcome = Result | Failure


class Executor(Protocol):
    """Interface of an executor, which runs tasks: `LocalExecutor` and `RayExecutor` implement it.

    It is used as a context manager. The end of the `with` block stops unfinished tasks.
    """

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    @property
    def width(self) -> int:
        """Largest number of tasks that run at a time; known only inside the `with` block."""

    def submit(self, task: Task) -> None:
        """Submit a task; it is ignored if a task with its key is pending already."""

    def wait(self) -> Outcome:
        """Wait for the next task that ends, and return its outcome.

        Raises:
            ExecutorError: no task is pending.
        """


def run_tasks(tasks: Sequence[Task], executor: Executor) -> dict[str, Outcome]:
    """Run tasks to their end and return their outcomes by key; a task that failed gives a `Failure`, no exception.

    Args:
        executor: an executor inside its `with` block, without other tasks.
    """
    keys = {task.key for task in tasks}
    for task in tasks:
        executor.submit(task)
    outcomes = [executor.wait() for _ in keys]
    return {outcome.key: outcome for outcome in outcomes}
