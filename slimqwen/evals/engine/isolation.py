"""Isolation: each engine runs in a process of its own, so that a crash or hang of vLLM becomes a result."""

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
from slimqwen.recipe.worker import death_cause
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
        log: file for their output, named in errors.
        worker: process that has imported vLLM; the engines' processes are forked from it.
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
        timed_out = False
        messages = self.worker.messages
        try:
            process = self.worker.give(
                _environment(self.server, modes),
                function,
                weights or self.server.variant.weights,
                self.log.parent,
                task,
            )
            kind = "started"
            while kind != "ended":
                if not timed_out and not messages.poll(max(0.0, deadline - time.monotonic())):
                    timed_out = True
                    with suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
                kind, *content = messages.recv()
                if kind == "progress":
                    activity = content[0]
                    progress(*content)
                elif kind != "ended":
                    outcome = kind, content[0]
                    deadline = time.monotonic() + _END_S
        except (EOFError, BrokenPipeError):
            raise EvalError(f"the process that starts engines died; its log says why: {self.log}") from None
        if outcome is not None:
            kind, result = outcome
            if kind == "refused":
                raise result
            return f"{activity}: {result[:300]}" if kind == "failed" else result
        if timed_out:
            return f"{activity or 'starting'}: no end within {self.timeout_s:.0f} s"
        (exit_code,) = content
        if exit_code == -signal.SIGKILL:
            raise EvalError(
                f"an engine's process was killed ({activity}), as when memory runs out; "
                f"free memory and run again: {self.log}"
            )
        death = death_cause(exit_code)
        if activity is None:
            raise EvalError(
                f"an engine's process ended before its first report ({death}); its log says why: {self.log}"
            )
        return f"{activity}: the process died ({death})"


def server_here(variant: Variant, action: str) -> ServerCommand:
    """The command that serves a variant on this machine.

    Args:
        action: verb for the message, such as "check".

    Raises:
        ServingError: the variant needs a GPU and there is none.
    """
    server = ServerCommand.resolve(variant)
    if server.platform != platforms.detect():
        raise ServingError(f"{variant.name} needs a GPU and there is none here; {action} it on a GPU host")
    return server


def titled(title: str, progress: Progress) -> Progress:
    """Progress of an engine under one title instead of the names of its scenarios."""
    return lambda _, done, total: progress(title, done, total)


def _environment(server: ServerCommand, modes: Modes | None = None) -> dict[str, str]:
    """Environment of an engine's process: the server's, with a compile cache that all combinations share.

    vLLM's own cache has a folder of torch's cache for every set of flags, so each combination would compile the same
    graphs again. Without vLLM's cache torch finds the graphs by their content.
    """
    environment = server.process_environment()
    environment.pop(compile_watch.VARIABLE, None)
    if modes is not None and modes.graphs != "eager":
        environment |= {
            "VLLM_DISABLE_COMPILE_CACHE": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(server.variant.root / ".cache" / "engines"),
        }
    return environment
