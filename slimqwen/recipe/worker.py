"""The process that one stage runs in: `python -m slimqwen.recipe.worker <descriptor>`.

Reads its job, a pickled (run, source, destination, parameters), from standard input, and sends messages to the pipe
whose descriptor it is given: ("progress", activity, done, total), and last one of ("done", facts, peak bytes),
("refused", SlimqwenError) and ("failed", text).
"""

import os
import pickle
import resource
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from slimqwen.errors import SlimqwenError


@contextmanager
def started(
    environment: Mapping[str, str], output: IO[bytes]
) -> Iterator[tuple["subprocess.Popen[bytes]", Connection]]:
    """A worker that waits for its job, and the messages that it will send; killed when the block ends.

    Args:
        environment: of its process; where modules are found is added.
        output: receives what it and its libraries print.
    """
    receiving, sending = os.pipe()
    with Connection(receiving, writable=False) as messages:
        process = subprocess.Popen(
            [sys.executable, "-m", "slimqwen.recipe.worker", str(sending)],
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
    """Tell a worker its job: run, source, destination, parameters.

    Raises:
        BrokenPipeError: it has died.
    """
    assert process.stdin is not None
    pickle.dump(job, process.stdin)
    process.stdin.flush()


def wait_for_end(process: "subprocess.Popen[bytes]") -> None:
    """Give a worker that is done a moment: its libraries may have to let go of a GPU, or of processes of their own."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=60)


def main() -> None:
    """Run the stage, and end at once if the process that wants its result does."""
    run, source, destination, parameters = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_runner, daemon=True).start()
    with Connection(int(sys.argv[1]), readable=False) as runner:
        try:
            facts = run(source, destination, parameters, lambda *heard: runner.send(("progress", *heard)))
            runner.send(("done", facts, _peak_memory()))
        except SlimqwenError as error:
            traceback.print_exc()
            runner.send(("refused", error))
        except Exception as error:
            traceback.print_exc()
            runner.send(("failed", f"{type(error).__name__}: {' '.join(str(error).split())}"))


def _end_with_runner() -> None:
    # The runner writes nothing more: standard input ends when the runner does, however it ends. Not through the buffer,
    # whose lock the interpreter wants when it shuts down.
    while os.read(0, 1):
        pass
    os._exit(1)


def _peak_memory() -> int:
    """Largest resident size of this process or of one that it started, bytes.

    Of itself the kernel's getrusage figure would include the parent's.
    """
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    own = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return 1024 * max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)


if __name__ == "__main__":
    main()
