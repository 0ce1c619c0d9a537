"""vLLM server process: start it for a `with` block, wait until it is ready, find one that already runs."""

import contextlib
import json
import select
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx
import psutil

from slimqwen import lifeline
from slimqwen.errors import explain_full_disk, is_full
from slimqwen.processes import spawner
from slimqwen.progress import Progress, silent
from slimqwen.serving import baked_cache, checks
from slimqwen.serving.command import ServerCommand
from slimqwen.serving.errors import ServingError
from slimqwen.serving.http_client import bypass_proxy, open_client
from slimqwen.serving.server_log import find_last_cause
from slimqwen.vllm_plugin import api_server
from slimqwen.vllm_plugin.patches.serving import compile_watch

_POLL_S = 0.1
"""Seconds between two questions whether a starting server is ready."""

_OVERDUE_S = 10.0
"""Seconds beyond its own time limit that a server on a busy host gets to end, before it is killed."""


@dataclass(frozen=True)
class RunningServer:
    """A vLLM server whose /health answered 200.

    Attributes:
        command: the command that the server runs.
        pid: process id of the API server.
        log: file of the server's output; None for a server that another program started.
    """

    command: ServerCommand
    pid: int
    log: Path | None

    def __post_init__(self) -> None:
        """Have all HTTP clients of this process reach the server without a proxy."""
        bypass_proxy(self.command.client_host)

    @property
    def base_url(self) -> str:
        """Address for a client on this machine, without a trailing slash."""
        return self.command.url

    @property
    def model(self) -> str:
        """Name of the model in requests."""
        return self.command.served_model_name

    @property
    def weights(self) -> Path:
        """The checkpoint folder."""
        return self.command.variant.weights


def prepare(command: ServerCommand, trouble: Iterable[checks.Trouble] = ()) -> None:
    """Check a command, and unpack the baked compile cache to where vLLM looks for it.

    Args:
        trouble: known trouble of this start, found by its plan.

    Raises:
        ServingError: the command cannot serve (`checks.check_command` lists the reasons and further exceptions), or the
            archive is damaged.
    """
    checks.check_command(command, trouble)
    if command.cache is not None and command.cache.usable:
        baked_cache.restore_cache(command.variant.weights, command.cache.usable, command.cache.root)


@contextlib.contextmanager
def run_server(
    command: ServerCommand,
    *,
    log: Path,
    kept_log: Path | str | None = None,
    timeout_s: float = 900,
    progress: Progress = silent,
) -> Iterator[RunningServer]:
    """Run a variant's server, on its TCP port, for the length of a `with` block.

    Args:
        log: file for everything that vLLM prints.
        kept_log: file that errors name instead of `log`, if `log` will be deleted and its lines are kept elsewhere.
        timeout_s: limit for the time until /health answers 200, seconds.
        progress: receives (activity, seconds since the start, 0).

    Raises:
        ServingError: the command cannot serve, or vLLM ended or was not ready in time; the message quotes the last
            error of its log.
    """
    command = command.on_port()
    prepare(command)
    log.parent.mkdir(parents=True, exist_ok=True)
    environment, folder = command.process_environment(), command.variant.root
    with (
        log.open("wb") as output,
        start_process(command.argv, environment=environment, folder=folder, output=output) as process,
    ):
        try:
            _wait_until_ready(process, command, log, timeout_s, progress)
        except ServingError as error:
            raise ServingError(f"{error}; read more in its log: {kept_log or log}") from None
        yield RunningServer(command, process.pid, log)


@dataclass(frozen=True)
class ServerProcess:
    """An API server that ends when this process ends.

    Attributes:
        pid: process id.
        lifeline: this process's end of a socket pair; the server and its forks hold the other end.
    """

    pid: int
    lifeline: socket.socket

    @property
    def has_ended(self) -> bool:
        """Whether the server and its forks have ended."""
        return bool(select.select([self.lifeline], [], [], 0)[0])

    def end(self) -> None:
        """End the server: close its lifeline, and kill it if that does not end it in time."""
        server = None
        with contextlib.suppress(psutil.NoSuchProcess):
            server = psutil.Process(self.pid)
        with contextlib.suppress(OSError):  # it has ended
            self.lifeline.shutdown(socket.SHUT_WR)
        if not select.select([self.lifeline], [], [], api_server.END_S + _OVERDUE_S)[0] and server:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since
                server.kill()
            select.select([self.lifeline], [], [], _OVERDUE_S)


@contextlib.contextmanager
def start_process(
    argv: Sequence[str], *, environment: Mapping[str, str], folder: Path, output: IO[bytes]
) -> Iterator[ServerProcess]:
    """Start an API server for the length of a `with` block; it also ends when this process ends.

    The server is a fork of the spawner (`slimqwen.processes.spawner`) if there is one, else a new process. It has its
    own process group, so that Ctrl-C does not reach it, but stays in the session of its starter: Linux divides CPU time
    between sessions first (autogroup), so a client in another session would receive tokens late and in bursts.

    Args:
        argv: the command of `slimqwen.vllm_plugin.api_server`.
        environment: all variables of the process.
        folder: working directory.
        output: file that receives what the server prints.

    Raises:
        ServingError: the command or the folder does not exist, or the spawner has died.
    """
    ours, theirs = socket.socketpair()
    with contextlib.ExitStack() as stack:
        stack.enter_context(ours)
        with theirs:
            if requests := spawner.find_spawner(argv):
                with contextlib.suppress(OSError):  # `_send_job` raises if the spawner has died
                    socket.send_fds(requests, [b"."], [theirs.fileno(), output.fileno()])
            else:
                process = _execute(argv, environment, folder, output, theirs)
        if requests:
            # Sent through a socket, because the environment may hold an API key, which a command line would show.
            job = {"argv": list(argv), "environment": dict(environment), "folder": str(folder)}
            pid = _send_job(ours, job)
        else:
            stack.enter_context(process)
            pid = process.pid
        server = ServerProcess(pid, ours)
        stack.callback(server.end)
        yield server


def _execute(
    argv: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    output: IO[bytes],
    socket_end: socket.socket,
) -> "subprocess.Popen[bytes]":
    try:
        return subprocess.Popen(
            argv,
            env={**environment, lifeline.VARIABLE: str(socket_end.fileno())},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=[socket_end.fileno()],
            process_group=0,
        )
    except OSError as error:
        raise ServingError(f"cannot start {argv[0]}: {error}; run `make install`") from error


def _send_job(connection: socket.socket, job: Mapping[str, Any]) -> int:
    """Send a job to a forked server; returns the server's process id."""
    line = b""
    with contextlib.suppress(OSError), connection.makefile("rb") as lines:
        connection.sendall(json.dumps(job).encode() + b"\n")
        line = lines.readline()
    if not line:
        raise ServingError(
            "the helper process that starts vLLM's servers died, as when memory runs out; free memory and run the "
            "command again"
        )
    return int(line)


def find_running(command: ServerCommand) -> RunningServer | None:
    """Find a ready server on the command's port that runs exactly this command, environment included.

    Returns:
        None if the port is free or used by anything else, such as a server that still warms up or already drains.
    """
    # Whether a baked cache was required does not change how a graph was obtained.
    wanted = {key: value for key, value in command.environment.items() if key != compile_watch.VARIABLE}
    for connection in psutil.net_connections("tcp"):
        if connection.status != psutil.CONN_LISTEN or connection.laddr[1:2] != (command.port,):
            continue
        with contextlib.suppress(psutil.Error, httpx.HTTPError):
            listener = psutil.Process(connection.pid)
            # On a GPU vLLM's engine is a fork of the API server and listens on the same socket.
            for process in (listener, *listener.parents()):
                if not _runs(process, command, wanted):
                    continue
                with open_client(timeout_s=5) as client:
                    ready = client.get(f"{command.url}/health")
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
    """A TCP port of 127.0.0.1 on which nothing listens at present."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_ready(
    process: ServerProcess, command: ServerCommand, log: Path, timeout_s: float, progress: Progress
) -> None:
    started = time.monotonic()
    activity = f"start {command.variant.name}"
    # One client for all requests, because each client makes a TLS context, which takes longer than a request.
    with open_client(timeout_s=2) as client:
        while (elapsed := time.monotonic() - started) < timeout_s:
            progress(activity, elapsed, 0)
            if process.has_ended:
                raise ServingError(f"vLLM ended before it was ready: {_failure(log)}")
            with contextlib.suppress(httpx.HTTPError):
                if client.get(f"{command.url}/health").status_code == httpx.codes.OK:
                    progress(activity, elapsed, elapsed)
                    return
            time.sleep(_POLL_S)
    raise ServingError(f"vLLM was not ready after {timeout_s:.0f} s: {_failure(log)}")


def _failure(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    cause = find_last_cause(log) or (lines or ["it printed nothing"])[-1].strip()
    return explain_full_disk(cause) if is_full(log.parent) else cause
