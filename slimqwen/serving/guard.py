"""Guard process: starts a server and ends it when its starter ends, whatever ended it (`python -m` this module).

Standard input is a socket whose other end only the starter holds open; it gives the command and a descriptor for the
server's output. The guard has that socket before it starts the server, so the starter's death never leaves a server
behind. It answers with the server's process id, and with its exit code if it ends by itself; then the guard ends too.
The kernel's parent-death signal is not enough: vLLM can lose a SIGTERM while it starts, and would serve on.

Guard and server have a process group of their own, so Ctrl-C does not reach them, but the session of their starter:
Linux shares the CPU between sessions first (autogroup), and a client of another one sees its tokens late, many at once.
"""

import contextlib
import json
import os
import select
import socket
import subprocess
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import psutil

STOP_TIMEOUT_S = 20.0
"""How long a server may take to end by itself."""

Poll = Callable[[], int | None]
"""Exit code of a server, None while it runs."""

_POLL_S = 0.25
_GRACE_S = 3.0
_CLEAN_UP_S = 10.0


def main() -> None:
    """Guard a server that is a process of its own."""
    with socket.socket(fileno=0) as starter:
        keep(starter, _execute)


def _execute(job: Mapping[str, Any], output: int) -> tuple[int, Poll]:
    process = subprocess.Popen(
        job["argv"],
        env=job["environment"],
        cwd=job["folder"],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        process_group=0,
    )
    return process.pid, process.poll


def keep(starter: socket.socket, start: Callable[[Mapping[str, Any], int], tuple[int, Poll]]) -> None:
    """Start the server that a starter asks for, and end it once the starter's end of the connection is closed.

    Args:
        start: gives the process id of the server and its exit code, from the job and a descriptor for its output.
    """
    data, descriptors, *_ = socket.recv_fds(starter, 1 << 16, 1)
    while data and not data.endswith(b"\n"):
        part = starter.recv(1 << 16)
        data = data + part if part else b""
    if not data or not descriptors:  # the starter died before the whole line was written
        return
    try:
        pid, poll = start(json.loads(data), descriptors[0])
    except OSError as error:
        _write_line(starter, str(error))
        return
    server = psutil.Process(pid)
    _write_line(starter, str(pid))
    while not select.select([starter], [], [], _POLL_S)[0]:
        if (code := poll()) is not None:
            _end_group(pid)
            _write_line(starter, str(code))
            return
    end(server)


def _write_line(starter: socket.socket, line: str) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the starter is gone
        starter.sendall(line.encode() + b"\n")


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
