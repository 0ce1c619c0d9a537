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
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psutil

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
        _write_line(str(error))
        return
    server = psutil.Process(process.pid)
    _write_line(str(process.pid))
    while not select.select([sys.stdin], [], [], _POLL_S)[0]:
        if process.poll() is not None:
            _end_group(process.pid)
            _write_line(str(process.returncode))
            return
    end(server)
    process.wait()


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

    def __init__(self, pid: int, guard: "subprocess.Popen[bytes]") -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._guard = guard

    def poll(self) -> int | None:
        """Exit code, or the negative number of the signal that ended it; None while it runs.

        If the guard was killed, its exit code counts as the server's.
        """
        assert self._guard.stdout is not None
        # The guard writes one line and ends, so `select` sees it even if the line was buffered.
        if self.returncode is None and select.select([self._guard.stdout], [], [], 0)[0]:
            line = self._guard.stdout.readline()
            self.returncode = int(line) if line else self._guard.wait()
        return self.returncode


@contextmanager
def guarded(
    argv: Sequence[str], *, environment: Mapping[str, str], folder: Path, output: IO[bytes]
) -> Iterator[Server]:
    """Run a server for the length of a `with` block, and no longer than this process.

    Args:
        argv: the command.
        environment: all variables of the process.
        folder: working directory.
        output: file that receives what the server prints.

    Raises:
        ServingError: the command or the folder does not exist.
    """
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
    job = {
        "argv": list(argv),
        "environment": dict(environment),
        "folder": str(folder),
        "output": output.fileno(),
    }
    server: psutil.Process | None = None
    try:
        # The environment may hold an API key: through the pipe, not on a command line.
        with contextlib.suppress(BrokenPipeError):
            guard.stdin.write(json.dumps(job).encode() + b"\n")
            guard.stdin.flush()
        line = guard.stdout.readline().decode().strip()
        if not line.isdecimal():
            raise ServingError(
                f"cannot start {argv[0]}: {line or 'its guard died'}; `make install` mends .venv"
            )
        with contextlib.suppress(psutil.NoSuchProcess):  # it may have ended already
            server = psutil.Process(int(line))
        yield Server(int(line), guard)
    finally:
        with contextlib.suppress(BrokenPipeError):
            guard.stdin.close()
        if guard.wait() != 0 and server is not None:  # a killed guard has ended nothing
            end(server)
        guard.stdout.close()


def _write_line(line: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # the starter is gone
        os.write(1, line.encode() + b"\n")


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
