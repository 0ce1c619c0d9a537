"""The worker: the process of one stage, `python -m slimqwen.recipe.worker <file descriptor>`.

It reads its job, a pickled (run, source, destination, parameters), from standard input and sends messages to the pipe
with that descriptor: ("progress", activity, done, total), and at the end one of ("done", facts, peak bytes),
("refused", SlimqwenError) and ("failed", text).
"""

import gc
import os
import pickle
import resource
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from slimqwen import lifeline
from slimqwen.errors import SlimqwenError

GARBAGE_THRESHOLD = 100_000
"""New objects after which a process with many imports looks for garbage; Python's default is 700."""


@contextmanager
def started(
    environment: Mapping[str, str],
    output: IO[bytes],
    module: str = __spec__.name,
    arguments: Sequence[str] = (),
) -> Iterator[tuple["subprocess.Popen[bytes]", Connection]]:
    """Start a worker: its process and the pipe of its messages. It is killed when the block ends.

    Args:
        environment: environment variables of the process; PYTHONPATH is added.
        output: file for what the worker and its libraries print.
        module: main module of the process, with further words of its command line.
    """
    receiving, sending = os.pipe()
    with Connection(receiving, writable=False) as messages:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(sending), *arguments],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=[sending],
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


def give(process: "subprocess.Popen[bytes]", *job: Any) -> None:
    """Send a worker its job: run, source, destination, parameters.

    Raises:
        BrokenPipeError: the worker has died.
    """
    assert process.stdin is not None
    pickle.dump(job, process.stdin)
    process.stdin.flush()


def wait_for_end(process: "subprocess.Popen[bytes]") -> None:
    """Wait for a finished worker to exit: its libraries may still release a GPU or stop processes of their own."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=60)


def death_cause(exit_code: int) -> str:
    """Exit code or signal that ended a process, in words."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    hint = ", as when memory runs out" if exit_code == -signal.SIGKILL else ""
    return signal.Signals(-exit_code).name + hint


def main() -> None:
    """Run the stage; exit at once if the runner ends."""
    lifeline.watch(0)
    # Most objects of a stage belong to its imports; a search for garbage among them takes a third of their time.
    gc.set_threshold(GARBAGE_THRESHOLD)
    job = pickle.load(sys.stdin.buffer)
    with Connection(int(sys.argv[1]), readable=False) as runner:
        perform(job, runner)


def perform(job: Any, runner: Connection) -> None:
    """Run a job (run, source, destination, parameters) and report to the runner."""
    run, source, destination, parameters = job
    try:
        facts = run(source, destination, parameters, lambda *message: runner.send(("progress", *message)))
        runner.send(("done", facts, _peak_memory()))
    except SlimqwenError as error:
        traceback.print_exc()
        runner.send(("refused", error))
    except Exception as error:
        traceback.print_exc()
        runner.send(("failed", f"{type(error).__name__}: {' '.join(str(error).split())}"))


def _peak_memory() -> int:
    """Largest resident size of this process or of a child, bytes.

    Own memory comes from /proc: getrusage's figure for the process itself would include the parent's.
    """
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    own = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return 1024 * max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)


if __name__ == "__main__":
    main()
