"""vLLM server process: start it for a `with` block, wait until it is ready, find one that already runs."""

import contextlib
import json
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx
import psutil

from slimqwen.progress import Progress, silent
from slimqwen.serving import baked_cache, checks, guard, spawner
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
        guarded(command.argv, environment=environment, folder=folder, output=output) as process,
    ):
        _wait_until_ready(process, command, log, timeout_s, progress)
        yield RunningServer(command, process.pid, log)


class GuardedServer:
    """Server process under a guard (`slimqwen.serving.guard`).

    Attributes:
        pid: process id.
        returncode: exit code at the last `poll`; None while it runs.
    """

    def __init__(self, pid: int, lines: IO[bytes]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._lines = lines

    def poll(self) -> int | None:
        """Exit code, or the negative number of the signal that ended it; None while it runs.

        A server whose guard was killed counts as killed.
        """
        # The guard writes one line and ends, so `select` sees it even if the line was buffered.
        if self.returncode is None and select.select([self._lines], [], [], 0)[0]:
            self.returncode = int(self._lines.readline() or -signal.SIGKILL)
        return self.returncode


@contextlib.contextmanager
def guarded(
    argv: Sequence[str], *, environment: Mapping[str, str], folder: Path, output: IO[bytes]
) -> Iterator[GuardedServer]:
    """Run a server for the length of a `with` block, and no longer than this process.

    Where there is a spawner (`slimqwen.serving.spawner`), the server is its fork, else a process of its own.

    Args:
        argv: the command.
        environment: all variables of the process.
        folder: working directory.
        output: file that receives what the server prints.

    Raises:
        ServingError: the command or the folder does not exist, or the spawner has died.
    """
    # The environment may hold an API key: through a socket, not on a command line.
    job = {"argv": list(argv), "environment": dict(environment), "folder": str(folder)}
    with contextlib.ExitStack() as stack:
        if path := spawner.socket_for(argv, environment):
            connection = stack.enter_context(socket.socket(socket.AF_UNIX))
            with contextlib.suppress(OSError):  # then no line comes back either
                connection.connect(path)
            no_answer = (
                "the process that servers are forked from died; run the command again, which starts another"
            )
        else:
            connection, other_end = socket.socketpair()
            with other_end:
                stack.enter_context(
                    subprocess.Popen(
                        [sys.executable, "-m", guard.__name__],
                        stdin=other_end.fileno(),
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                        process_group=0,
                    )
                )
            stack.enter_context(connection)
            no_answer = f"cannot start {argv[0]}: its guard died; `make install` mends .venv"
        yield stack.enter_context(_server(connection, job, output, no_answer))


@contextlib.contextmanager
def _server(
    connection: socket.socket, job: Mapping[str, Any], output: IO[bytes], no_answer: str
) -> Iterator[GuardedServer]:
    """The server of the guard at the other end of a connection; `no_answer` says what is wrong if there is none."""
    server: psutil.Process | None = None
    with connection.makefile("rb") as lines:
        try:
            line = ""
            with contextlib.suppress(OSError):  # nobody is there
                content = json.dumps(job).encode() + b"\n"
                sent = socket.send_fds(connection, [content], [output.fileno()])
                connection.sendall(content[sent:])
                line = lines.readline().decode().strip()
            if not line.isdecimal():
                refusal = f"cannot start {job['argv'][0]}: {line}; `make install` mends .venv"
                raise ServingError(refusal if line else no_answer)
            with contextlib.suppress(psutil.NoSuchProcess):  # it may have ended already
                server = psutil.Process(int(line))
            yield GuardedServer(int(line), lines)
        finally:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
                while lines.readline():  # until its guard has ended
                    pass
            if server is not None and server.is_running():  # a killed guard has ended nothing
                guard.end(server)


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
    process: GuardedServer, command: ServerCommand, log: Path, timeout_s: float, progress: Progress
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
