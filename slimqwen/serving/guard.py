"""Starts a server, and ends it when whoever wanted it is gone, however that died: `python -m slimqwen.serving.guard`.

Its standard input is a pipe that only the starter holds open; the first line says what to start. It holds that pipe
before there is a server, so at no moment would the starter's death leave one behind. Its standard output says the
server's process, and the exit code of one that ends by itself, after which the guard ends too. A signal from the kernel
at the starter's death would not do: vLLM can lose a SIGTERM while it starts, and then serves on with nobody to end it.
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

from slimqwen.errors import SlimqwenError

STOP_TIMEOUT_S = 20.0
"""How long a server may take to end by itself."""

_POLL_S = 0.25
_GRACE_S = 3.0
_CLEAN_UP_S = 10.0


class NotStartedError(SlimqwenError):
    """The server's process could not be started."""


def main() -> None:
    """Start what the first line asks for, and end it once the starter's end of the pipe is closed."""
    line = sys.stdin.readline()
    if not line.endswith("\n"):  # the starter died before it had said everything
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
            start_new_session=True,
        )
    except OSError as error:
        _say(str(error))
        return
    server = psutil.Process(process.pid)
    _say(str(process.pid))
    while not select.select([sys.stdin], [], [], _POLL_S)[0]:
        if process.poll() is not None:
            _end_session(process.pid)
            _say(str(process.returncode))
            return
    end(server)
    process.wait()


def _end_session(leader: int) -> None:
    """End what a server that was killed has left behind: its engine holds memory, a GPU's too, and notices nothing."""
    left = []
    for one in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(one.pid) == leader:
                left.append(one)
    for one in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.terminate()
    _, left = psutil.wait_procs(left, timeout=_GRACE_S)
    _kill(left)


class Server:
    """A process that a guard has started.

    Attributes:
        pid: its number.
        returncode: its exit code, as `poll` last found it; None while it runs.
    """

    def __init__(self, pid: int, guard: "subprocess.Popen[bytes]") -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._guard = guard

    def poll(self) -> int | None:
        """Its exit code, a negative signal's number where one ended it; None while it runs.

        A server whose guard was killed counts as ended the same way: nobody would end it.
        """
        assert self._guard.stdout is not None
        # What a buffer holds back from `select`, the guard's own end gives away.
        if self.returncode is None and select.select([self._guard.stdout], [], [], 0)[0]:
            said = self._guard.stdout.readline()
            self.returncode = int(said) if said else self._guard.wait()
        return self.returncode


@contextmanager
def guarded(
    argv: Sequence[str], *, environment: Mapping[str, str], folder: Path, output: IO[bytes]
) -> Iterator[Server]:
    """Run a server for the length of a `with` block, and no longer than this process.

    Args:
        argv: the command.
        environment: all of it.
        folder: where it runs.
        output: a file that receives what it prints.

    Raises:
        NotStartedError: there is no such command or folder.
    """
    guard = subprocess.Popen(
        [sys.executable, "-m", "slimqwen.serving.guard"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=[output.fileno()],
        start_new_session=True,
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
        said = guard.stdout.readline().decode().strip()
        if not said.isdecimal():
            raise NotStartedError(
                f"cannot start {argv[0]}: {said or 'its guard died'}; `make install` mends .venv"
            )
        with contextlib.suppress(psutil.NoSuchProcess):  # it may have ended already
            server = psutil.Process(int(said))
        yield Server(int(said), guard)
    finally:
        with contextlib.suppress(BrokenPipeError):
            guard.stdin.close()
        if guard.wait() != 0 and server is not None:  # a guard that was killed ends nothing
            end(server)
        guard.stdout.close()


def _say(line: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody is left to hear it
        os.write(1, line.encode() + b"\n")


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
    _, alive = psutil.wait_procs([*alive, *members], timeout=_GRACE_S)
    _kill(alive)


def _kill(processes: Iterable[psutil.Process]) -> None:
    """End by force; what frees the shared memory of the others, multiprocessing's resource tracker, only after them."""
    trackers: list[psutil.Process] = []
    others: list[psutil.Process] = []
    for one in processes:
        with contextlib.suppress(psutil.Error):
            (trackers if "multiprocessing.resource_tracker" in " ".join(one.cmdline()) else others).append(
                one
            )
    for one in others:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    # It ends by itself once all that it served have, unless it hangs.
    _, hung = psutil.wait_procs([*others, *trackers], timeout=_CLEAN_UP_S)
    for one in hung:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    psutil.wait_procs(hung, timeout=_GRACE_S)


if __name__ == "__main__":
    main()
