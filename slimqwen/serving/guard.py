"""Ends a server when whoever started it is gone, however that died: `python -m slimqwen.serving.guard`.

Its standard input is a pipe that only the starter holds open. It is told the server's process there, and, where the
starter has ended the server itself, "released". A signal from the kernel at the starter's death would not do: vLLM can
lose a SIGTERM while it starts, and then serves on with nobody left to end it.
"""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

STOP_TIMEOUT_S = 20.0
"""How long a server may take to end by itself."""

_RELEASED = "released"


def main() -> None:
    """Wait for the starter's end of the pipe to close, and end the server unless it was released."""
    first = sys.stdin.readline().strip()
    if not first:
        return
    try:
        # Its start time is remembered with it: another process of the same number is left alone.
        server = psutil.Process(int(first))
    except psutil.NoSuchProcess:
        return
    if sys.stdin.read().strip() != _RELEASED:
        end(server)


@contextmanager
def guarding() -> Iterator["Guard"]:
    """A guard for a server that is about to be started."""
    process = subprocess.Popen(
        [sys.executable, "-m", "slimqwen.serving.guard"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        yield Guard(process)
    finally:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.wait()


class Guard:
    """The starter's end."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def watch(self, pid: int) -> None:
        """Name the server's process."""
        self._tell(str(pid))

    def release(self) -> None:
        """Say that the server has ended."""
        self._tell(_RELEASED)

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()


def end(server: psutil.Process) -> None:
    """End a process by SIGTERM, after `STOP_TIMEOUT_S` by force, and with it every process it started."""
    members = []
    with contextlib.suppress(psutil.NoSuchProcess):
        members = server.children(recursive=True)
        server.terminate()
    _, alive = psutil.wait_procs([server], timeout=STOP_TIMEOUT_S)
    for one in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            members += [member for member in one.children(recursive=True) if member not in members]
            one.kill()
    _, alive = psutil.wait_procs([*alive, *members], timeout=3)
    for one in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    psutil.wait_procs(alive, timeout=3)


if __name__ == "__main__":
    main()
