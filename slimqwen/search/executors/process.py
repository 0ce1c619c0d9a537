"""A task in a process of its own: what raises, crashes or runs out of memory there is a failure here."""

import os
import signal
from pathlib import Path
from typing import Any

from slimqwen.progress import Progress
from slimqwen.recipe import worker
from slimqwen.recipe.warm_worker import WarmWorker
from slimqwen.search.executors.task import Failure, Outcome, Result, Task


def run(task: Task, root: Path, progress: Progress) -> Outcome:
    """Run a task in a process of its own; the process and its children end with this one.

    Args:
        task: the task.
        root: the repository; what the task prints goes to logs/task-<key>.log there.
        progress: receives the task's progress.
    """
    log = root / "logs" / f"task-{task.key[:40]}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output, worker.started(os.environ, output) as (process, messages):
        try:
            worker.give(process, _call, root, log.parent, (task.function, task.argument))
            while (message := messages.recv())[0] == "progress":
                progress(*message[1:])
            worker.wait_for_end(process)
        except (EOFError, BrokenPipeError):
            return Failure(task.key, _death(process.wait(), log))
    kind, *content = message
    if kind != "done":
        return Failure(task.key, " ".join(str(content[0]).split()))
    return Result(task.key, content[0])


def run_forked(task: Task, root: Path, warm: WarmWorker, progress: Progress) -> Outcome:
    """Run a task in a fork of a process that has imported vLLM, which spares the seconds of imports.

    Args:
        task: the task.
        root: the repository.
        warm: where the fork is made; what the task prints goes to its log.
        progress: receives the task's progress.
    """
    kind: str = "failed"
    content: list[Any] = ["its process died"]
    try:
        warm.give(os.environ, _call, root, root / "logs", (task.function, task.argument))
        while (message := warm.messages.recv())[0] != "ended":
            if message[0] == "progress":
                progress(*message[1:])
            else:
                kind, *content = message
    except (EOFError, BrokenPipeError):
        return Failure(task.key, "the process that tasks are forked from died")
    if kind != "done":
        death = f" (exit code {message[1]})" if message[1] else ""
        return Failure(task.key, " ".join(str(content[0]).split()) + death)
    return Result(task.key, content[0])


def _call(root: Path, _: Path, job: tuple[Any, Any], progress: Progress) -> Any:
    function, argument = job
    return function(root, argument, progress)


def _death(exit_code: int, log: Path) -> str:
    cause = f"exit code {exit_code}"
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        cause = name + (", as when memory runs out" if exit_code == -signal.SIGKILL else "")
    return f"its process died ({cause}); its log is logs/{log.name}"
