"""The worker: a process that runs one function, `python -m slimqwen.processes.worker <file descriptor>`.

It reads its job, a pickled (folder, function, arguments), from standard input, calls function(*arguments, progress) and
writes messages to the pipe with that descriptor: ("progress", activity, done, total), and at the end one of
("done", value, peak bytes), ("refused", SlimqwenError) and ("failed", text).
"""

import gc
import os
import pickle
import resource
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from slimqwen import lifeline
from slimqwen.errors import SlimqwenError, explain_full_disk, explain_os_error, is_full

GARBAGE_THRESHOLD = 100_000
"""Threshold of garbage collection for a process with many imports, new objects; Python's default is 700."""

_DEATHS = {
    signal.SIGKILL: ", as when memory runs out",
    signal.SIGBUS: ", as when /dev/shm or the disk is full",
}
"""Signals that end a process -> why."""


@contextmanager
def started(
    environment: Mapping[str, str],
    output: IO[bytes],
    module: str = __spec__.name,
    arguments: Sequence[str] = (),
    descriptors: Sequence[int] = (),
) -> Iterator[tuple["subprocess.Popen[bytes]", Connection]]:
    """Start a worker and yield its process and the pipe of its messages; it is killed at the end of the block.

    Args:
        environment: environment variables of the process; PYTHONPATH is added.
        output: file for the output of the worker and its libraries.
        module: main module of the process.
        arguments: further words of its command line.
        descriptors: further open files that the process inherits.
    """
    receiving, sending = os.pipe()
    with Connection(receiving, writable=False) as messages:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(sending), *arguments],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=[sending, *descriptors],
            env={**environment, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        os.close(sending)
        try:
            yield process, messages
        finally:
            process.kill()
            process.wait()
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()


def give(
    process: "subprocess.Popen[bytes]", folder: Path, function: Callable[..., Any], *arguments: Any
) -> None:
    """Send a worker its job.

    Args:
        folder: folder in which the job writes; whether its disk is full decides how a failure is explained.
        function: function(*arguments, progress), importable by name.

    Raises:
        BrokenPipeError: the worker has died.
    """
    write_input(process, (folder, function, arguments))


def write_input(process: "subprocess.Popen[bytes]", content: Any) -> None:
    """Write to the standard input of a worker; raises BrokenPipeError if it has died."""
    assert process.stdin is not None
    pickle.dump(content, process.stdin)
    process.stdin.flush()


def wait_for_end(process: "subprocess.Popen[bytes]") -> None:
    """Wait for a finished worker to exit: its libraries may still release a GPU or stop processes of their own."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=60)


def death_cause(exit_code: int) -> str:
    """The exit code or signal that ended a process, in words."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    number = signal.Signals(-exit_code)
    return number.name + _DEATHS.get(number, "")


def main() -> None:
    """Read the job and run it; exit at once if the process that started this one ends."""
    lifeline.watch(0)
    # Most objects of a job belong to its imports, and collecting garbage takes a third of the time of imports.
    gc.set_threshold(GARBAGE_THRESHOLD)
    job = pickle.load(sys.stdin.buffer)
    with Connection(int(sys.argv[1]), readable=False) as runner:
        perform(job, runner)


def perform(job: Any, runner: Connection) -> None:
    """Run a job in this process, and send its messages to the process that gave it; an exception becomes a message.

    Args:
        job: (folder, function, arguments), as `give` sends it.
        runner: connection to the process that gave the job.
    """
    folder, function, arguments = job
    try:
        value = function(*arguments, lambda *message: runner.send(("progress", *message)))
        runner.send(("done", value, _peak_memory()))
    except SlimqwenError as error:
        _log_traceback()
        runner.send(("refused", error))
    except Exception as error:
        text = explain_os_error(error) or f"{type(error).__name__}: {' '.join(str(error).split())}"
        if is_full(folder) and "disk space" not in text:  # as torch.save, which does not say so
            text = explain_full_disk(text)
        if isinstance(error, ModuleNotFoundError):
            text += "; run `make install`"
        _log_traceback()
        runner.send(("failed", text))


def _log_traceback() -> None:
    with suppress(OSError):  # the log is on the disk that is full
        traceback.print_exc()


def _peak_memory() -> int:
    """Peak resident memory of this process or of one of its children, whichever is larger, bytes.

    That of this process is read from /proc, because getrusage would include memory of the parent from before the fork.
    """
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    own = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return 1024 * max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)


if __name__ == "__main__":
    main()
