"""A command with all its processes but without vLLM: warm worker, spawner, job, and a server with engine and worker.

`python -m` this module FOLDER [stubborn] prints the server's process id. With a first word it is one of the others:
`warm-worker`, or `server`, which a job of FOLDER/executed starts as a process of its own.
"""

import multiprocessing
import os
import signal
import sys
import time
import types
from pathlib import Path
from typing import Any

from slimqwen import host, lifeline
from slimqwen.processes import warm_worker, worker
from slimqwen.processes.warm_worker import WarmWorker
from slimqwen.progress import Progress
from slimqwen.serving.server import start_process
from slimqwen.vllm_plugin import api_server

STUBBORN = "stubborn"


def _wait() -> None:
    time.sleep(600)


def _start_worker() -> None:
    _run_child(_wait)


def _run_child(function: Any) -> None:
    def run() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        function()

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    child.join()


def _serve() -> None:
    """Start an engine as vLLM does, and end when it does."""
    lifeline.end_with_parent()
    with api_server._own_sockets():
        if STUBBORN in sys.argv:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _run_child(_start_worker)


def serve(folder: Path, words: list[str], progress: Progress) -> None:
    """A job: start a server and wait for its end."""
    executed = folder.name == "executed"
    module = __spec__.name if executed else api_server.__name__
    argv = [sys.executable, "-m", module, *(["server"] if executed else []), *words]
    # A server with variables that an import may have read, as other tests leave them, is no fork.
    environment = {name: value for name, value in os.environ.items() if not host.is_stray(name)}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    with (
        (folder / "log").open("wb") as output,
        start_process(argv, environment=environment, folder=folder, output=output) as server,
    ):
        progress(str(server.pid), 1, 1)
        while not server.has_ended:
            time.sleep(0.05)
    raise RuntimeError("the server ended")


def main(folder: Path, words: list[str]) -> None:
    """Give a warm worker a job; end with it."""
    with (
        (folder / "worker.log").open("wb") as output,
        worker.started(os.environ, output, __spec__.name, ["warm-worker"]) as (process, messages),
    ):
        WarmWorker(messages, process).give(os.environ, folder, serve, folder, words)
        sys.stdout.write(f"{messages.recv()[1]}\n")
        sys.stdout.flush()
        messages.recv()


if __name__ == "__main__":
    sys.modules["slimqwen.vllm_plugin.patches.cpu.forked_processes"] = types.SimpleNamespace(  # type: ignore[assignment]
        set_threads=lambda: None
    )
    api_server.import_server = lambda: None
    api_server.freeze = lambda: None
    api_server._serve = _serve
    warm_worker._import_engine = lambda: None
    match sys.argv[1:]:
        case ["server", *_]:
            api_server.main()
        case [descriptor, "warm-worker"]:
            sys.argv = [sys.argv[0], descriptor, "--spawner"]
            warm_worker.main()
        case [folder, *words]:
            main(Path(folder), words)
