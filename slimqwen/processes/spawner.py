"""The spawner: a process on a CPU that has imported vLLM's API server and forks a server for each request.

Half the time of a start on a CPU goes into imports. A server that is forked here needs none, and is as fresh as a new
process, because vLLM has not run anything in the spawner. `share_spawner` starts a spawner for the servers of a block
(`python -m` this module, with requests on standard input); `slimqwen.processes.warm_worker` forks one for its jobs.

A request consists of two descriptors: the server's end of a socket on which it receives its job, and its output. The
socket for requests is inherited by forks, and by a stage's process as a descriptor (`pass_on`).
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

from slimqwen import host, lifeline
from slimqwen.identity import changed_names

_API_SERVER = "slimqwen.vllm_plugin.api_server"

_READ_AT_USE = frozenset(
    {"VLLM_API_KEY", "VLLM_CACHE_ROOT", "VLLM_CPU_KVCACHE_SPACE", "VLLM_NO_USAGE_STATS", "VLLM_PLUGINS"}
    # `cache_dir` of torch/_inductor/runtime/cache_dir_utils.py; the patch `forked_processes` sets the other two.
    | {"TORCHINDUCTOR_CACHE_DIR", "OMP_NUM_THREADS", "TORCHINDUCTOR_CPP_DYNAMIC_THREADS"}
)
"""Environment variables of vLLM and torch that a fork heeds: all others may have been read by an import."""

_VARIABLE = "SLIMQWEN_SPAWNER"
"""Environment variable with the number of an inherited descriptor of the socket for requests."""

_block: ExitStack | None = None  # of `share_spawner`
_inherited = os.environ.pop(_VARIABLE, None)
_requests = socket.socket(fileno=int(_inherited)) if _inherited else None  # to the spawner of this process


def pass_on() -> tuple[dict[str, str], tuple[int, ...]]:
    """Environment variables and descriptors that a child process must inherit to use this process's spawner."""
    if _requests is None:
        return {}, ()
    return {_VARIABLE: str(_requests.fileno())}, (_requests.fileno(),)


@contextmanager
def share_spawner() -> Iterator[None]:
    """Fork all servers that are started in a `with` block from one spawner; on a GPU this has no effect.

    The first server starts the spawner. In a job or a block that already has a spawner, that spawner is used.
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


def find_spawner(argv: Sequence[str]) -> socket.socket | None:
    """Find the socket on which to request a server from the spawner, which is started if the block has none yet.

    Args:
        argv: command line of the server.

    Returns:
        None if the server must be a new process: no block shares a spawner, or the command is not the API server's.
    """
    if tuple(argv[1:3]) != ("-m", _API_SERVER):
        return None
    if _block is not None and _requests is None and host.detect() == "cpu":
        _start_process(_block)
    return _requests


def _start_process(block: ExitStack) -> None:
    """Start a spawner that lives until the end of `block`; early requests wait until it has imported vLLM."""
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
                **host.preloaded_libraries(os.environ),
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
    """Import vLLM's API server, and fork servers until the process that started the spawner ends."""
    from slimqwen.vllm_plugin import api_server

    lifeline.watch(0)
    before = drop_strays()
    gc.disable()
    api_server.import_server()
    api_server.freeze()
    _fork_servers(socket.socket(fileno=os.dup(0)), before)


def drop_strays() -> dict[str, str]:
    """Delete this process's environment variables that servers must not get, before an import reads them.

    Returns:
        A copy of the variables that are left.
    """
    for name in filter(host.is_stray, [*os.environ]):
        del os.environ[name]
    return dict(os.environ)


def fork_spawner(before: Mapping[str, str], descriptor: int) -> None:
    """Fork a spawner for this process and its forks; the spawner ends with the last of them.

    This process must have imported vLLM's API server and must not have run anything of vLLM.

    Args:
        before: environment variables that this process had when it imported vLLM.
        descriptor: an open descriptor of this process that the spawner must not keep.
    """
    global _requests
    _requests, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        _requests.close()
        os.close(descriptor)
        _fork_servers(theirs, before)
    theirs.close()


def _fork_servers(requests: socket.socket, before: Mapping[str, str]) -> NoReturn:
    """Fork a server for each request, until no process is left that could send one."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps ended servers
    read_end, write_end = os.pipe()  # closed with this process, which ends its servers
    while descriptors := socket.recv_fds(requests, 1, 2)[1]:
        starter, output = descriptors
        if os.fork() == 0:
            os.close(write_end)
            requests.close()
            _serve(starter, read_end, output, before)
        os.close(starter)
        os.close(output)
    os._exit(0)


def _serve(starter: int, spawner: int, output: int, before: Mapping[str, str]) -> NoReturn:
    """Turn this fork into the API server of its job, as if the job's command had been executed.

    It is executed where an import may have read another value of a variable than the job's.
    """
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
        if _ignores(before, job["environment"]):
            os.set_inheritable(starter, True)
            os.execve(job["argv"][0], job["argv"], job["environment"] | {lifeline.VARIABLE: str(starter)})
        set_by_imports = {name: value for name, value in os.environ.items() if before.get(name) != value}
        # Before the environment is replaced, because setproctitle writes over the memory of the original one.
        setproctitle.setproctitle(" ".join(job["argv"]))
        os.environ.clear()
        os.environ.update({**set_by_imports, **job["environment"]})
        sys.argv = job["argv"][2:]
        api_server.run_fork(starter, spawner)
    finally:  # must not return into the spawner's own code
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(1)


def _ignores(before: Mapping[str, str], environment: Mapping[str, str]) -> bool:
    """Whether a fork may ignore a variable: its value is neither the one that imports found nor the one they set."""
    changed = {*changed_names(before, environment)} & {*changed_names(os.environ, environment)}
    return any(
        name.startswith("VLLM_") or host.TORCH_VARIABLE.fullmatch(name) for name in changed - _READ_AT_USE
    )


if __name__ == "__main__":
    main()
