"""Tasks, their outcomes, and the interface of an executor.

A task is a function that is importable by name and an argument that can be pickled. It runs in a process of its own, so
a crash of vLLM is a failure of the task and never of the search.

    with LocalExecutor(root, progress) as executor:
        executor.submit(Task("key", "title", function, argument))
        outcome = executor.wait()  # Result or Failure
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from slimqwen.errors import SlimqwenError
from slimqwen.progress import Progress

ENGINE_BYTES = 3 << 30
"""Resident size of vLLM's and a measurement's processes without weights and cache, which a small model hardly has."""


@dataclass(frozen=True)
class Resources:
    """Resources that a task needs of its node.

    Attributes:
        memory_bytes: main memory, bytes; 0 where nothing is known.
        whole_node: whether nothing may run beside it, as for a timing.
    """

    gpus: int = 0
    memory_bytes: int = 0
    whole_node: bool = False


@dataclass(frozen=True)
class Task:
    """A unit of work. Running it again must give the same value and leave the same files.

    Attributes:
        key: content key. A task whose key is already submitted is not submitted again.
        title: name in progress displays and messages.
        function: function(root, argument, progress) -> value, importable by name; root is the repository.
        argument: picklable.
        urgent: whether it begins before the tasks that wait already, because others need its output.
    """

    key: str
    title: str
    function: Callable[[Path, Any, Progress], Any]
    argument: Any
    resources: Resources = Resources()
    urgent: bool = False


def content_key(*ingredients: Any) -> str:
    """Key of a task from everything that decides its value, as JSON."""
    text = json.dumps(ingredients, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


@dataclass(frozen=True)
class Result:
    """The outcome of a task that ended well: the value of its function."""

    key: str
    value: Any


@dataclass(frozen=True)
class Failure:
    """The outcome of a task that raised or died, with the reason in one line, and the expected error that it raised."""

    key: str
    reason: str
    error: SlimqwenError | None = None


Outcome = Result | Failure


class Executor(Protocol):
    """Runs tasks. At the end of its `with` block tasks that have not ended are stopped."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    @property
    def width(self) -> int:
        """Tasks that run at a time at most, once the executor is entered."""

    def submit(self, task: Task) -> None:
        """Hand in a task; one whose key is pending already is ignored."""

    def wait(self) -> Outcome:
        """The outcome of the next task that ends.

        Raises:
            SearchError: no task is pending.
        """


def run_tasks(tasks: Sequence[Task], executor: Executor) -> dict[str, Outcome]:
    """Run tasks to their end on an executor that is entered and has no others; returns their outcomes by key."""
    keys = {task.key for task in tasks}
    for task in tasks:
        executor.submit(task)
    outcomes = [executor.wait() for _ in keys]
    return {outcome.key: outcome for outcome in outcomes}
