"""The spawner: a process that has imported vLLM's API server and forks a server for every command, on a CPU.

Half of a start on a CPU is imports. Here each server is a fork of a process in which vLLM has run nothing yet, so it
is as fresh as one of its own, without them. `shared` makes the process for the servers of a block (`python -m` this
module, with the descriptor of its socket), `slimqwen.recipe.warm_worker` one for those of its jobs, whose environment
names the socket. `slimqwen.serving.server` asks there. A server ends with its starter's connection.
"""

import ctypes
import gc
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from slimqwen.serving import guard, platform

SOCKET = "SLIMQWEN_SPAWNER"
"""Environment variable with the path of the socket, for jobs that may start servers."""

_API_SERVER = "slimqwen.vllm_plugin.api_server"

_READ_AT_USE = frozenset(
    {"VLLM_API_KEY", "VLLM_CACHE_ROOT", "VLLM_CPU_KVCACHE_SPACE", "VLLM_NO_USAGE_STATS", "VLLM_PLUGINS"}
)
"""Variables of vLLM that it does not read while it is imported."""

_DEATH_SIGNAL_OPTION = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>

_block: ExitStack | None = None  # of `shared`


@contextmanager
def shared() -> Iterator[None]:
    """Fork the servers of a block from one process, made for the first of them; on a GPU nothing changes.

    Inside a job or a block that has a spawner, servers are forks of that one.
    """
    global _block
    if SOCKET in os.environ or _block is not None:
        yield
        return
    try:
        with ExitStack() as _block:
            yield
    finally:
        _block = None


def socket_for(argv: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """Path of the socket to ask for a server; None where the server needs a process of its own.

    Args:
        argv: the server's command.
        environment: all of its variables; one that vLLM may read while it is imported needs a process of its own.
    """
    names = {name for name in environment if name.startswith("VLLM_")}
    if tuple(argv[1:3]) != ("-m", _API_SERVER) or not names <= _READ_AT_USE:
        return None
    if _block is not None and SOCKET not in os.environ and platform.detect() == "cpu":
        _start_process(_block)
    return os.environ.get(SOCKET)


def _start_process(block: ExitStack) -> None:
    """Start a spawner, which is ready once it has imported vLLM; a connection before waits for it."""
    path = block.enter_context(tempfile.TemporaryDirectory(prefix="slimqwen.")) + "/spawner"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, str(listener.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            env={
                **os.environ,
                **platform.preloaded_libraries(os.environ),
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
            process_group=0,
        )
    block.enter_context(process)
    block.callback(process.kill)
    os.environ[SOCKET] = path
    block.callback(os.environ.pop, SOCKET, None)


def main() -> None:
    """Import vLLM's API server, and fork servers until standard input ends."""
    from slimqwen.vllm_plugin import api_server

    before = dict(os.environ)
    gc.disable()
    api_server.import_server()
    api_server.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        _listen(listener, new_variables(before), sys.stdin.fileno())


def new_variables(before: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that have been set or changed since."""
    return {name: value for name, value in os.environ.items() if before.get(name) != value}


def start(path: str, variables: Mapping[str, str], descriptor: int) -> None:
    """Fork a spawner from this process, which has imported vLLM's API server.

    It listens at a path and ends when this process ends. To be called before anything has computed in this process.

    Args:
        path: of the socket.
        variables: environment variables that importing vLLM has set.
        descriptor: an open descriptor of this process that the spawner must not keep.
    """
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL_OPTION, signal.SIGKILL)
        os.close(descriptor)
        _replace_input()
        _listen(listener, variables)
    listener.close()


def _listen(listener: socket.socket, variables: Mapping[str, str], starter: int | None = None) -> None:
    """Give every connection a guard of its own, until the starter's descriptor can be read."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a guard ended
    sources: list[int] = [listener.fileno(), *([] if starter is None else [starter])]
    while starter not in select.select(sources, [], [])[0]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if starter is not None:
                _replace_input()
            guard.keep(connection, partial(_fork, connection, variables))
            os._exit(0)
        connection.close()


def _fork(
    connection: socket.socket, variables: Mapping[str, str], job: Mapping[str, Any], output: int
) -> tuple[int, guard.Poll]:
    """Start a server as a fork of this process."""
    pid = os.fork()
    if pid == 0:
        connection.close()
        _serve(job, output, variables)

    def poll() -> int | None:
        ended, status = os.waitpid(pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if ended else None

    return pid, poll


def _serve(job: Mapping[str, Any], output: int, variables: Mapping[str, str]) -> NoReturn:
    """Become the API server of a job, as if its command had been executed."""
    import setproctitle

    from slimqwen.vllm_plugin import api_server

    try:
        os.setpgid(0, 0)
        os.chdir(job["folder"])
        _replace_input()
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        # First: it looks for its memory in the old environment.
        setproctitle.setproctitle(" ".join(job["argv"]))
        os.environ.clear()
        os.environ.update({**variables, **job["environment"]})
        sys.argv = job["argv"][2:]
        api_server.run()
    finally:  # not into the spawner's own code
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(1)


def _replace_input() -> None:
    """Let standard input be empty."""
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)


if __name__ == "__main__":
    main()
