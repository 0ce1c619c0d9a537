"""The spawner: a process that has imported vLLM's API server and forks a server for every request, on a CPU.

Half of a start on a CPU is imports. Here each server is a fork of a process in which vLLM has run nothing yet, so it
is as fresh as one of its own, without them. `share_spawner` starts a spawner for the servers of a block (`python -m`
this module, its requests on standard input), `slimqwen.recipe.warm_worker` forks one for those of its jobs.

A request is two descriptors: the server's end of a socket, on which its job comes, and its output. Forks inherit the
socket for requests, other processes do not.
"""

import gc
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NoReturn

from slimqwen import lifeline
from slimqwen.serving import platform

_API_SERVER = "slimqwen.vllm_plugin.api_server"

_READ_AT_USE = frozenset(
    {"VLLM_API_KEY", "VLLM_CACHE_ROOT", "VLLM_CPU_KVCACHE_SPACE", "VLLM_NO_USAGE_STATS", "VLLM_PLUGINS"}
)
"""Variables of vLLM that it does not read while it is imported."""

_block: ExitStack | None = None  # of `share_spawner`
_requests: socket.socket | None = None  # to the spawner of this process


@contextmanager
def share_spawner() -> Iterator[None]:
    """Fork the servers of a block from one process, started for the first of them; on a GPU nothing changes.

    Inside a job or a block that has a spawner, servers are forks of that one.
    """
    global _block
    if _requests is not None or _block is not None:
        yield
        return
    try:
        with ExitStack() as _block:
            yield
    finally:
        _block = None


def find_spawner(argv: Sequence[str], environment: Mapping[str, str]) -> socket.socket | None:
    """The socket for the request of a server; None where the server needs a process of its own.

    Args:
        argv: the server's command.
        environment: all of its variables; one that vLLM may read while it is imported needs a process of its own.
    """
    names = {name for name in environment if name.startswith("VLLM_")}
    if tuple(argv[1:3]) != ("-m", _API_SERVER) or not names <= _READ_AT_USE:
        return None
    if _block is not None and _requests is None and platform.detect() == "cpu":
        _start_process(_block)
    return _requests


def _start_process(block: ExitStack) -> None:
    """Start a spawner for the rest of a block; requests before it has imported vLLM wait for it."""
    global _requests
    _requests, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name],
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={
                **os.environ,
                **platform.preloaded_libraries(os.environ),
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
            process_group=0,
        )
    block.enter_context(process)
    block.callback(_end_process, process)


def _end_process(process: "subprocess.Popen[bytes]") -> None:
    global _requests
    process.kill()
    assert _requests is not None
    _requests.close()
    _requests = None


def main() -> None:
    """Import vLLM's API server, and fork servers until the starter ends."""
    from slimqwen.vllm_plugin import api_server

    lifeline.watch(0)
    before = dict(os.environ)
    gc.disable()
    api_server.import_server()
    api_server.freeze()
    _fork_servers(socket.socket(fileno=os.dup(0)), new_variables(before))


def new_variables(before: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that have been set or changed since."""
    return {name: value for name, value in os.environ.items() if before.get(name) != value}


def fork_spawner(variables: Mapping[str, str], descriptor: int) -> None:
    """Fork a spawner for this process and its forks; it ends with the last of them.

    This process has imported vLLM's API server, and nothing has computed in it.

    Args:
        variables: environment variables that importing vLLM has set.
        descriptor: an open descriptor of this process that the spawner must not keep.
    """
    global _requests
    _requests, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        _requests.close()
        os.close(descriptor)
        _fork_servers(theirs, variables)
    theirs.close()


def _fork_servers(requests: socket.socket, variables: Mapping[str, str]) -> NoReturn:
    """Fork a server for every request, until nobody is left who could send one."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a server ended
    read_end, write_end = os.pipe()  # a server ends with this process too
    while descriptors := socket.recv_fds(requests, 1, 2)[1]:
        starter, output = descriptors
        if os.fork() == 0:
            os.close(write_end)
            requests.close()
            _serve(starter, read_end, output, variables)
        os.close(starter)
        os.close(output)
    os._exit(0)


def _serve(starter: int, spawner: int, output: int, variables: Mapping[str, str]) -> NoReturn:
    """Become the API server of a job, as if its command had been executed."""
    import setproctitle

    from slimqwen.vllm_plugin import api_server

    try:
        os.setpgid(0, 0)
        with open(starter, "rb", closefd=False) as lines:
            line = lines.readline()
        if not line.endswith(b"\n"):  # the starter died before the whole line was written
            os._exit(1)
        job = json.loads(line)
        os.write(starter, b"%d\n" % os.getpid())
        os.chdir(job["folder"])
        with Path(os.devnull).open("rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # First: it looks for its memory in the old environment.
        setproctitle.setproctitle(" ".join(job["argv"]))
        os.environ.clear()
        os.environ.update({**variables, **job["environment"]})
        sys.argv = job["argv"][2:]
        api_server.run_fork(starter, spawner)
    finally:  # not into the spawner's own code
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    main()
