"""Guard process: starts a server and ends it when its starter ends, whatever ended it (`python -m` this module).

Standard input is a pipe that only the starter holds open; its first line is the command. The guard has that pipe
before it starts the server, so the starter's death never leaves a server behind. Standard output gives the server's
process id, and its exit code if it ends by itself; then the guard ends too. The kernel's parent-death signal is not
enough: vLLM can lose a SIGTERM while it starts, and would serve on.

Guard and server have a process group of their own, so Ctrl-C does not reach them, but the session of their starter:
Linux shares the CPU between sessions first (autogroup), and a client of another one sees its tokens late, many at once.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import psutil

from slimqwen.serving import spawner
from slimqwen.serving.errors import ServingError

STOP_TIMEOUT_S = 20.0
"""How long a server may take to end by itself."""

_POLL_S = 0.25
_GRACE_S = 3.0
_CLEAN_UP_S = 10.0


def main() -> None:
    """Start the command of the first line, and end it once the starter's end of the pipe is closed."""
    line = sys.stdin.readline()
    if not line.endswith("\n"):  # the starter died before the whole line was written
        return
    job = json.loads(line)
    try:
        process = subprocess.Popen(
            job["argv"],
            env=job["environment"],
            cwd=job["folder"],
            stdin=subprocess.DEVNULL,
            stdout=job["output"],
            stderr=subprocess.STDOUT,
            process_group=0,
        )
    except OSError as error:
        _write_line(str(error), 1)
        return
    watch(process.pid, process.poll, sys.stdin.fileno(), 1)
    process.wait()


def watch(pid: int, poll: Callable[[], int | None], starter: int, output: int) -> None:
    """Say which process a server has, and end it when its starter ends; say its exit code if it ends by itself.

    Args:
        pid: process of the server, a child of this one.
        poll: its exit code, None while it runs.
        starter: descriptor that can be read once the starter has ended.
        output: descriptor that the lines are written to.
    """
    server = psutil.Process(pid)
    _write_line(str(pid), output)
    while not select.select([starter], [], [], _POLL_S)[0]:
        if (code := poll()) is not None:
            _end_group(pid)
            _write_line(str(code), output)
            return
    end(server)


def _end_group(leader: int) -> None:
    """End the process group of a dead server: its engine runs on and holds memory of the host and the GPU."""
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(process.pid) == leader:
                members.append(process)
    for process in members:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, members = psutil.wait_procs(members, timeout=_GRACE_S)
    _kill(members)


class Server:
    """Server process under a guard.

    Attributes:
        pid: process id.
        returncode: exit code at the last `poll`; None while it runs.
    """

    def __init__(self, pid: int, lines: IO[bytes], guards_end: Callable[[], int]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._lines, self._guards_end = lines, guards_end

    def poll(self) -> int | None:
        """Exit code, or the negative number of the signal that ended it; None while it runs.

        If the guard was killed, its exit code counts as the server's.
        """
        # The guard writes one line and ends, so `select` sees it even if the line was buffered.
        if self.returncode is None and select.select([self._lines], [], [], 0)[0]:
            line = self._lines.readline()
            self.returncode = int(line) if line else self._guards_end()
        return self.returncode


@contextmanager
def guarded(
    argv: Sequence[str], *, environment: Mapping[str, str], folder: Path, output: IO[bytes]
) -> Iterator[Server]:
    """Run a server for the length of a `with` block, and no longer than this process.

    Where there is a spawner (`slimqwen.serving.spawner`), the server is its fork, else a process of its own.

    Args:
        argv: the command.
        environment: all variables of the process.
        folder: working directory.
        output: file that receives what the server prints.

    Raises:
        ServingError: the command or the folder does not exist.
    """
    job = {"argv": list(argv), "environment": dict(environment), "folder": str(folder)}
    if path := spawner.socket_for(argv, environment):
        with _forked(path, job, output) as server:
            yield server
        return
    with _executed(job, output) as server:
        yield server


@contextmanager
def _executed(job: Mapping[str, Any], output: IO[bytes]) -> Iterator[Server]:
    guard = subprocess.Popen(
        [sys.executable, "-m", "slimqwen.serving.guard"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=[output.fileno()],
        process_group=0,
    )
    assert guard.stdin is not None
    assert guard.stdout is not None
    server: psutil.Process | None = None
    try:
        # The environment may hold an API key: through the pipe, not on a command line.
        with contextlib.suppress(BrokenPipeError):
            guard.stdin.write(_line({**job, "output": output.fileno()}))
            guard.stdin.flush()
        line = guard.stdout.readline().decode().strip()
        if not line.isdecimal():
            raise ServingError(
                f"cannot start {job['argv'][0]}: {line or 'its guard died'}; `make install` mends .venv"
            )
        with contextlib.suppress(psutil.NoSuchProcess):  # it may have ended already
            server = psutil.Process(int(line))
        yield Server(int(line), guard.stdout, guard.wait)
    finally:
        with contextlib.suppress(BrokenPipeError):
            guard.stdin.close()
        if guard.wait() != 0 and server is not None:  # a killed guard has ended nothing
            end(server)
        guard.stdout.close()


@contextmanager
def _forked(path: str, job: Mapping[str, Any], output: IO[bytes]) -> Iterator[Server]:
    """Run a server that a spawner forks.

    Raises:
        ServingError: the spawner has died.
    """
    server: psutil.Process | None = None
    with socket.socket(socket.AF_UNIX) as connection, connection.makefile("rb") as lines:
        try:
            with contextlib.suppress(OSError):  # then there is no line to read either
                connection.connect(path)
                line = _line(job)
                sent = socket.send_fds(connection, [line], [output.fileno()])
                connection.sendall(line[sent:])
            pid = _first_line(lines)
            if not pid.isdecimal():
                raise ServingError(
                    "the process that servers are forked from died; run the command again, which starts another"
                )
            with contextlib.suppress(psutil.NoSuchProcess):  # it may have ended already
                server = psutil.Process(int(pid))
            yield Server(int(pid), lines, lambda: -signal.SIGKILL)
        finally:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
                while lines.readline():  # until its guard has ended
                    pass
            if server is not None and server.is_running():  # a killed guard has ended nothing
                end(server)


def _first_line(lines: IO[bytes]) -> str:
    with contextlib.suppress(OSError):
        return lines.readline().decode().strip()
    return ""


def _line(job: Mapping[str, Any]) -> bytes:
    return json.dumps(job).encode() + b"\n"


def _write_line(line: str, output: int) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the starter is gone
        os.write(output, line.encode() + b"\n")


def end(server: psutil.Process) -> None:
    """End a process by SIGTERM, after `STOP_TIMEOUT_S` by force, and with it every process it started."""
    members = []
    with contextlib.suppress(psutil.NoSuchProcess):
        members = server.children(recursive=True)
        server.terminate()
    _, alive = psutil.wait_procs([server], timeout=STOP_TIMEOUT_S)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            members += [member for member in process.children(recursive=True) if member not in members]
            process.kill()
    _, alive = psutil.wait_procs([*alive, *members], timeout=_GRACE_S)
    _kill(alive)


def _kill(processes: Iterable[psutil.Process]) -> None:
    """End by force; multiprocessing's resource tracker last, because it frees the shared memory of the others."""
    trackers: list[psutil.Process] = []
    others: list[psutil.Process] = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            is_tracker = "multiprocessing.resource_tracker" in " ".join(process.cmdline())
            (trackers if is_tracker else others).append(process)
    for process in others:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    # A tracker ends by itself after the processes that it serves, unless it hangs.
    _, hung = psutil.wait_procs([*others, *trackers], timeout=_CLEAN_UP_S)
    for process in hung:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(hung, timeout=_GRACE_S)


if __name__ == "__main__":
    main()
