"""Runs a variant's engines one after the other, each in its own process, so that a crash or hang of one is a result."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from slimqwen.errors import SlimqwenError
from slimqwen.evals import EvalError
from slimqwen.processes import warm_worker
from slimqwen.processes.warm_worker import WarmWorker
from slimqwen.processes.worker import death_cause
from slimqwen.progress import Progress, progress_of
from slimqwen.serving.command import ServerCommand
from slimqwen.vllm_plugin.patches.serving import compile_watch

Task = TypeVar("Task")
Result = TypeVar("Result")

_END_S = 60.0  # a finished engine may still release a GPU


@dataclass(frozen=True)
class EngineProcesses:
    """Runs a variant's engines one after the other, each in its own process.

    Attributes:
        server: command of the variant's server; the processes get its environment.
        timeout_s: time limit of each process, seconds.
        log: file for the output of the processes; errors name it.
        worker: process that has imported vLLM; each engine's process is a fork of it.
    """

    server: ServerCommand
    timeout_s: float
    log: Path
    worker: WarmWorker

    @classmethod
    @contextmanager
    def started(cls, server: ServerCommand, timeout_s: float, log: Path) -> Iterator[Self]:
        """Start the process that imports vLLM, and stop it at the end of the `with` block; makes the log's folder.

        Args:
            server: command of the variant's server; the processes get its environment.
            timeout_s: time limit of each engine's process, seconds.
            log: file for the output of the processes.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = _environment(server, is_served=True)
        with log.open("ab") as output, warm_worker.started(environment, output) as worker:
            yield cls(server, timeout_s, log, worker)

    def run(
        self,
        function: Callable[[Path, Task, Progress], Result],
        task: Task,
        title: str,
        progress: Progress,
        *,
        is_served: bool = False,
    ) -> Result | str:
        """Call function(weights, task, progress) in a process of its own.

        Args:
            function: must report progress before it starts the engine: a process that ends before its first report says
                nothing about the engine.
            task: second argument of the function.
            title: name of the engine in progress and errors.
            progress: receives (activity, done, total) from the function.
            is_served: whether the process uses the compile cache that a server would use.

        Returns:
            The function's result; if it raised, crashed or hung, one line of text with the reason.

        Raises:
            EvalError: the process ended before its first report, or was killed from outside, as by the kernel when
                memory runs out.
            SlimqwenError: the function raised it, an expected error such as unusable settings.
        """
        report = progress_of(title, progress)
        activity, result, refusal = "", None, None
        deadline, timed_out = time.monotonic() + self.timeout_s, False
        messages = self.worker.messages
        environment = _environment(self.server, is_served=is_served)
        try:
            process = self.worker.give(
                environment,
                self.log.parent,
                function,
                self.server.variant.weights,
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
                    report(*content)
                elif kind != "ended":
                    result = f"{activity}: {content[0][:300]}" if kind == "failed" else content[0]
                    refusal = result if kind == "refused" else None
                    deadline = time.monotonic() + _END_S
        except (EOFError, BrokenPipeError):
            raise EvalError(
                f"the helper process that starts vLLM's engines died; read why in its log: {self.log}"
            ) from None
        if isinstance(refusal, SlimqwenError):
            raise refusal
        if result is not None:
            return result
        if timed_out:
            return f"{activity or 'starting'}: not finished within {self.timeout_s:.0f} s"
        (exit_code,) = content
        death = death_cause(exit_code)
        if exit_code == -signal.SIGKILL or not activity:
            place = activity or "before its first report"
            cure = (
                "free memory and run the command again; its log"
                if exit_code == -signal.SIGKILL
                else "read why in its log"
            )
            raise EvalError(f"{title}: the process ended {place} ({death}); {cure}: {self.log}")
        return f"{activity}: the process died ({death})"


def _environment(server: ServerCommand, *, is_served: bool) -> dict[str, str]:
    """Environment of an engine's process: that of the server, but neighbours and reference share a compile cache.

    vLLM keeps a separate torch cache for every set of flags, so each engine would compile the same graphs again.
    With vLLM's cache disabled, torch finds the graphs in one shared cache by their content.
    """
    environment = server.process_environment()
    environment.pop(compile_watch.VARIABLE, None)
    if not is_served:
        environment |= {
            "VLLM_DISABLE_COMPILE_CACHE": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(server.variant.root / ".cache" / "engines"),
        }
    return environment
