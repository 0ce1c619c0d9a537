"""Isolation: an engine runs in a process of its own, so that a crash or a hang of vLLM there is a result here."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from slimqwen.evals import EvalError
from slimqwen.progress import Progress
from slimqwen.recipe import warm_worker
from slimqwen.recipe.warm_worker import WarmWorker
from slimqwen.serving import platform as platforms
from slimqwen.serving.command import ServerCommand
from slimqwen.serving.errors import ServingError
from slimqwen.serving.unsafe_engines import Modes
from slimqwen.variant import Variant
from slimqwen.vllm_plugin import compile_watch

_END_S = 60.0  # a finished engine may still release a GPU


@dataclass(frozen=True)
class Engines:
    """Engines of a variant, one after the other, each in a process of its own.

    Attributes:
        server: command of the variant's server, whose environment they have.
        timeout_s: time limit of each, seconds.
        log: receives what they print, and is named in errors.
        worker: the process that has imported vLLM, of which theirs are forked.
    """

    server: ServerCommand
    timeout_s: float
    log: Path
    worker: WarmWorker

    @classmethod
    @contextmanager
    def started(cls, server: ServerCommand, timeout_s: float, log: Path) -> Iterator[Self]:
        """Import vLLM for the length of a `with` block; the log's folder is made."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output, warm_worker.started(_environment(server), output) as worker:
            yield cls(server, timeout_s, log, worker)

    def run(
        self,
        function: Callable[..., Any],
        task: Any,
        progress: Progress,
        *,
        modes: Modes | None = None,
        weights: Path | None = None,
    ) -> Any:
        """Call function(weights, the log's folder, task, progress) in a process of its own.

        Args:
            function: a function of a module; it reports progress before anything else, because a process that ends
                before its first report says nothing about the engine.
            task: picklable.
            modes: of the engine; None for the reference engine's.
            weights: checkpoint instead of the variant's.

        Returns:
            What the function returns; one line of text where it raised, crashed or hung.

        Raises:
            EvalError: the process ended before its first report, or was killed from outside, as by the kernel when
                memory runs out.
        """
        activity: str | None = None
        outcome: tuple[str, Any] | None = None
        deadline = time.monotonic() + self.timeout_s
        messages = self.worker.messages
        try:
            process = self.worker.give(
                _environment(self.server, modes),
                function,
                weights or self.server.variant.weights,
                self.log.parent,
                task,
            )
            while messages.poll(max(0.0, deadline - time.monotonic())):
                kind, *content = messages.recv()
                if kind == "ended":
                    return _result(outcome, content[0], activity, self.log)
                if kind == "progress":
                    activity = content[0]
                    progress(*content)
                else:
                    outcome = kind, content[0]
                    deadline = time.monotonic() + _END_S
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
            while messages.recv()[0] != "ended":
                pass
        except (EOFError, BrokenPipeError):
            raise EvalError(f"the process that starts engines died; its log says why: {self.log}") from None
        if outcome is not None:
            return _result(outcome, 0, activity, self.log)
        return f"{activity or 'starting'}: no end within {self.timeout_s:.0f} s"


def server_here(variant: Variant, doing: str) -> ServerCommand:
    """The command that serves a variant on this machine.

    Args:
        doing: what to do with it on a GPU host, for the message.

    Raises:
        ServingError: the variant needs a GPU and there is none.
    """
    server = ServerCommand.resolve(variant)
    if server.platform != platforms.detect():
        raise ServingError(f"{variant.name} needs a GPU and there is none here; {doing} it on a GPU host")
    return server


def titled(title: str, progress: Progress) -> Progress:
    """Progress of one engine under one title, whatever its scenario is called."""
    return lambda _, done, total: progress(title, done, total)


def _environment(server: ServerCommand, modes: Modes | None = None) -> dict[str, str]:
    """Environment of an engine's process: the server's, with a compile cache that all combinations share.

    vLLM's own cache keeps a folder of torch's for every set of flags, so each combination would compile the same graphs
    anew. Without it torch finds them by their content.
    """
    environment = server.process_environment()
    environment.pop(compile_watch.VARIABLE, None)
    if modes is not None and modes.graphs != "eager":
        environment |= {
            "VLLM_DISABLE_COMPILE_CACHE": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(server.variant.root / ".cache" / "engines"),
        }
    return environment


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
