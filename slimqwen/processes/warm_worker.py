"""The warm worker: a process that has imported vLLM and forks itself for each job (`python -m` this module).

The arguments are the descriptor for its messages and, if its jobs start servers, `--spawner`; with `--cold` it imports
nothing in advance. A job runs as in `worker`, in a process of its own that may crash or hang, but need not import
anything. For each job it sends ("started", process id), then the messages of `worker`, then ("ended", exit code).
"""

import gc
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, NoReturn

from slimqwen import lifeline
from slimqwen.processes import spawner, worker

_SPAWNER, _COLD = "--spawner", "--cold"


@dataclass(frozen=True)
class WarmWorker:
    """Handle of a process that has imported vLLM, and runs one job after the other, each in a fork of itself.

    Attributes:
        messages: connection with the messages of the jobs.
    """

    messages: Connection
    _process: "subprocess.Popen[bytes]"

    def give(
        self, environment: Mapping[str, str], folder: Path, function: Callable[..., Any], *arguments: Any
    ) -> int:
        """Start a job and wait until its process runs; the previous job must have ended.

        Args:
            environment: variables of the job's process; those that torch and vLLM read at import have no effect.
            folder: folder in which the job writes; whether its disk is full decides how a failure is explained.
            function: function(*arguments, progress), importable by name.

        Returns:
            The process id of the job.

        Raises:
            BrokenPipeError: the warm worker has died.
            EOFError: the warm worker died before it had imported vLLM.
        """
        self.send(environment, folder, function, *arguments)
        _, pid = self.messages.recv()
        return int(pid)

    def send(
        self, environment: Mapping[str, str], folder: Path, function: Callable[..., Any], *arguments: Any
    ) -> None:
        """Send a job without waiting until it starts; the previous job must have ended.

        Args:
            environment: variables of the job's process; those that torch and vLLM read at import have no effect.
            folder: folder in which the job writes; whether its disk is full decides how a failure is explained.
            function: function(*arguments, progress), importable by name.

        Raises:
            BrokenPipeError: the warm worker has died.
        """
        worker.write_input(self._process, (dict(environment), (folder, function, arguments)))


@contextmanager
def started(
    environment: Mapping[str, str], output: IO[bytes], *, forks_servers: bool = False, imports: bool = True
) -> Iterator[WarmWorker]:
    """Start a warm worker for a `with` block, at whose end it and the process of its job end.

    Args:
        environment: environment variables of the process; PYTHONPATH is added.
        output: file for the output of jobs.
        forks_servers: whether servers that jobs start are forks, too (`slimqwen.processes.spawner`).
        imports: whether the worker imports vLLM; if not, each job imports what it needs.
    """
    arguments = [*([_SPAWNER] if forks_servers else []), *([] if imports else [_COLD])]
    with worker.started(environment, output, __spec__.name, arguments) as (process, messages):
        yield WarmWorker(messages, process)


def main() -> None:
    """Import vLLM once, run each job in a fork, and exit when the parent process ends."""
    lifeline.watch(0)
    descriptor, *options = sys.argv[1:]
    is_warm = _COLD not in options
    if is_warm:
        _warm_up(int(descriptor), forks_servers=_SPAWNER in options)
    else:
        gc.set_threshold(worker.GARBAGE_THRESHOLD)
    with Connection(int(descriptor), readable=False) as runner, suppress(EOFError):
        while True:
            environment, job = pickle.load(sys.stdin.buffer)
            read_end, write_end = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(write_end)
                # The job waits until its process id has been sent, which has to come before its first message.
                os.read(read_end, 1)
                _perform(job, environment, runner, read_end, is_warm=is_warm)
            os.close(read_end)
            runner.send(("started", pid))
            with suppress(BrokenPipeError):  # the job has died
                os.write(write_end, b".")
            _, status = os.waitpid(pid, 0)
            os.close(write_end)  # kept open until here, because its end would end the job
            runner.send(("ended", os.waitstatus_to_exitcode(status)))


def _warm_up(descriptor: int, *, forks_servers: bool) -> None:
    """Import vLLM and, if `forks_servers`, fork the spawner of servers."""
    gc.disable()
    from slimqwen.vllm_plugin import api_server

    before = spawner.drop_strays() if forks_servers else {}
    _import_engine()
    if forks_servers:
        api_server.import_server()
    api_server.freeze()
    if forks_servers:
        spawner.fork_spawner(before, descriptor)


def _import_engine() -> None:
    # Loads what vLLM imports lazily with the class of the engine.
    import vllm.v1.engine.llm_engine
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        import vllm.v1.worker.cpu_worker  # noqa: F401


def _perform(
    job: Any, environment: Mapping[str, str], runner: Connection, parent: int, *, is_warm: bool
) -> NoReturn:
    lifeline.watch(0, parent)
    os.environ.clear()
    os.environ.update(environment)
    if is_warm:
        from slimqwen.vllm_plugin.patches.cpu import forked_processes

        forked_processes.set_threads()
    worker.perform(job, runner)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
