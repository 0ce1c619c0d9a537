"""Isolation: a function runs in a process of its own, so that a crash or a hang of vLLM there is a result here."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from slimqwen.evals import EvalError
from slimqwen.progress import Progress
from slimqwen.recipe import warm_worker
from slimqwen.recipe.warm_worker import WarmWorker

_END_S = 60.0  # a finished engine may still release a GPU


@contextmanager
def engine_processes(environment: Mapping[str, str], log: Path) -> Iterator[WarmWorker]:
    """The process of which `run_isolated` forks its own, for the length of a `with` block.

    Args:
        environment: environment variables with which vLLM is imported.
        log: file for what the engines print; its folder is made.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output, warm_worker.started(environment, output) as worker:
        yield worker


def run_isolated(
    function: Callable[..., Any],
    weights: Path,
    task: Any,
    *,
    worker: WarmWorker,
    environment: Mapping[str, str],
    timeout_s: float,
    log: Path,
    progress: Progress,
) -> Any:
    """Call function(weights, folder, task, progress) in a process of its own.

    Args:
        function: a function of a module; it reports progress before anything else, because a process that ends before
            its first report says nothing about the engine.
        task: argument of the function, picklable.
        worker: what `engine_processes` gives.
        environment: environment variables of the process.
        timeout_s: time limit, seconds.
        log: the file named in errors; the function receives its folder.

    Returns:
        What the function returns; one line of text where it raised, crashed or hung.

    Raises:
        EvalError: the process ended before its first report, or was killed from outside, as by the kernel when
            memory runs out.
    """
    activity: str | None = None
    outcome: tuple[str, Any] | None = None
    deadline = time.monotonic() + timeout_s
    try:
        process = worker.give(environment, function, weights, log.parent, task)
        while worker.messages.poll(max(0.0, deadline - time.monotonic())):
            kind, *content = worker.messages.recv()
            if kind == "ended":
                return _result(outcome, content[0], activity, log)
            if kind == "progress":
                activity = content[0]
                progress(*content)
            else:
                outcome = kind, content[0]
                deadline = time.monotonic() + _END_S
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        while worker.messages.recv()[0] != "ended":
            pass
    except (EOFError, BrokenPipeError):
        raise EvalError(f"the process that starts engines died; its log says why: {log}") from None
    if outcome is not None:
        return _result(outcome, 0, activity, log)
    return f"{activity or 'starting'}: no end within {timeout_s:.0f} s"


def _result(outcome: tuple[str, Any] | None, exit_code: int, activity: str | None, log: Path) -> Any:
    """What a process that has ended amounts to.

    Args:
        outcome: kind and content of its last message; None where it sent none.
        activity: what it reported last.
    """
    if outcome is not None:
        kind, content = outcome
        if kind == "refused":
            raise content
        return f"{activity}: {content[:300]}" if kind == "failed" else content
    if exit_code == -signal.SIGKILL:
        raise EvalError(
            f"the process of an engine was killed ({activity}), as when memory runs out; free some and run again: {log}"
        )
    death = f"signal {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exit code {exit_code}"
    if activity is None:
        raise EvalError(f"the process of an engine did not begin ({death}): {log}")
    return f"{activity}: the process died ({death})"
