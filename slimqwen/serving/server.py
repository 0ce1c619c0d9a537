"""vLLM server process: start it for a `with` block, wait until it is ready, find one that already runs."""

import contextlib
import re
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from slimqwen.progress import Progress, silent
from slimqwen.serving import baked_cache, checks, guard
from slimqwen.serving.command import ServerCommand
from slimqwen.serving.errors import ServingError
from slimqwen.vllm_plugin import compile_watch

_POLL_S = 0.1
"""How often to ask a server that starts whether it is ready."""


@dataclass(frozen=True)
class RunningServer:
    """A vLLM server whose /health answered 200.

    Attributes:
        command: the command that it runs.
        pid: process of its API server.
        log: file of its output, None for a server that somebody else started.
    """

    command: ServerCommand
    pid: int
    log: Path | None

    @property
    def base_url(self) -> str:
        """Address for a client on this machine, without a trailing slash."""
        return self.command.url

    @property
    def model(self) -> str:
        """The model's name in requests."""
        return self.command.served_model_name

    @property
    def weights(self) -> Path:
        """The checkpoint folder."""
        return self.command.variant.weights


def prepare(command: ServerCommand, trouble: Iterable[checks.Trouble] = ()) -> None:
    """Check a command, and unpack the baked compile cache to where vLLM looks for it.

    Args:
        command: the server's command.
        trouble: what the plan of this start dies of.

    Raises:
        ServingError: the archive is damaged, or one of the errors of `checks.check`.
    """
    checks.check(command, trouble)
    if command.cache is not None and command.cache.usable:
        baked_cache.restore(command.variant.weights, command.cache.usable, command.cache.root)


@contextlib.contextmanager
def run_server(
    command: ServerCommand, *, log: Path, timeout_s: float = 900, progress: Progress = silent
) -> Iterator[RunningServer]:
    """Run a variant's server for the length of a `with` block.

    Args:
        command: the server's command.
        log: file for everything that vLLM prints.
        timeout_s: limit for the time until /health answers 200, seconds.
        progress: receives (activity, seconds since the start, 0).

    Raises:
        ServingError: vLLM ended or was not ready in time, its log's last error quoted; or an error of `prepare`.
    """
    prepare(command)
    log.parent.mkdir(parents=True, exist_ok=True)
    environment, folder = command.process_environment(), command.variant.root
    with (
        log.open("wb") as output,
        guard.guarded(command.argv, environment=environment, folder=folder, output=output) as process,
    ):
        _wait_until_ready(process, command, log, timeout_s, progress)
        yield RunningServer(command, process.pid, log)


def find_running(command: ServerCommand) -> RunningServer | None:
    """Find a ready server on the command's port that runs exactly this command, environment included.

    Returns:
        None where the port is free, or taken by anything else, a server that warms up or drains included.
    """
    # Whether a baked cache was required does not change how a graph was obtained.
    wanted = {key: value for key, value in command.environment.items() if key != compile_watch.VARIABLE}
    for connection in psutil.net_connections("tcp"):
        if connection.status != psutil.CONN_LISTEN or connection.laddr[1:2] != (command.port,):
            continue
        with contextlib.suppress(psutil.Error, httpx.HTTPError):
            listener = psutil.Process(connection.pid)
            # On a GPU vLLM's engine is a fork of the API server and has its socket too.
            for process in (listener, *listener.parents()):
                if not _runs(process, command, wanted):
                    continue
                ready = httpx.get(f"{command.url}/health", timeout=5, trust_env=False)
                return (
                    RunningServer(command, process.pid, None) if ready.status_code == httpx.codes.OK else None
                )
    return None


def _runs(process: psutil.Process, command: ServerCommand, environment: Mapping[str, str]) -> bool:
    if process.cmdline()[1:] != list(command.argv[1:]):
        return False
    present = process.environ()
    return all(present.get(key) == value for key, value in environment.items())


def free_port() -> int:
    """A TCP port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_ready(
    process: guard.Server, command: ServerCommand, log: Path, timeout_s: float, progress: Progress
) -> None:
    started = time.monotonic()
    activity = f"start {command.variant.name}"
    # One client for all questions: each makes a TLS context, which takes longer than the question.
    with httpx.Client(timeout=2, trust_env=False) as client:
        while (elapsed := time.monotonic() - started) < timeout_s:
            progress(activity, elapsed, 0)
            if process.poll() is not None:
                raise ServingError(
                    f"vLLM ended with exit code {process.returncode} before it was ready: {_last_error(log)}; "
                    f"log: {log}"
                )
            with contextlib.suppress(httpx.HTTPError):
                if client.get(f"{command.url}/health").status_code == httpx.codes.OK:
                    progress(activity, elapsed, elapsed)
                    return
            time.sleep(_POLL_S)
    raise ServingError(f"vLLM was not ready after {timeout_s:.0f} s: {_last_error(log)}; log: {log}")


def _last_error(log: Path) -> str:
    """The last line of a log that names an exception, else its last line."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    # What was under way when the event loop ended says nothing of why it did.
    errors = [line for line in lines if re.search(r"(?<!Cancelled)Error", line) and "raise " not in line]
    return (errors or lines or ["it printed nothing"])[-1].rpartition("] ")[2].strip()
