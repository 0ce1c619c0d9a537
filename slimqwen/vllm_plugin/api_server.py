"""vLLM's API server with its modules imported once for all of its processes (`python -m` this module, vLLM's flags).

The import makes hundreds of thousands of objects that stay. It takes only two thirds of the CPU time while the garbage
collector, which would scan them again and again, is disabled. Objects that forks share are frozen, so that no
collection writes to them.
"""

import gc
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from slimqwen import lifeline
from slimqwen.errors import SlimqwenError

END_S = 2
"""How long a server may take to end by itself after the process that started it has ended, seconds."""

_own_folder: tempfile.TemporaryDirectory[str] | None = None  # of `_own_sockets`

_SOCKETS = "VLLM_RPC_BASE_PATH"
_LONGEST_TEMPORARY_FOLDER = 50


def main() -> NoReturn:
    """Import vLLM, run its API server with the flags of the command line, and exit.

    A server that a measurement started ends when the measurement ends (`slimqwen.lifeline`).
    """
    if descriptor := os.environ.pop(lifeline.VARIABLE, None):
        lifeline.watch(int(descriptor), end=_end)
    gc.disable()
    lifeline.exit_after(_refusals()(_import_and_serve))


def _import_and_serve() -> None:
    import_server()
    freeze()
    _serve()


def import_server() -> None:
    """Import vLLM's API server. To be called before `freeze` and before a fork."""
    import vllm.entrypoints.launchers.api_server.entry  # noqa: F401


def freeze() -> None:
    """Make this process, which has imported vLLM with the garbage collector disabled, ready to be forked."""
    from slimqwen.vllm_plugin.patches.cpu import forked_processes

    forked_processes.allow()
    gc.freeze()
    gc.enable()


def run_fork(*lifelines: int) -> NoReturn:
    """Run the API server with the flags of sys.argv, and exit; end it early once a descriptor of `lifelines` closes."""
    lifeline.watch(*lifelines, end=_end)
    lifeline.exit_after(_refusals()(_serve))


def _end() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(END_S)
    # vLLM waits 5 s for an engine that is ended while it starts, because that waits for its sockets (zmq).
    if _own_folder is not None:
        _own_folder.cleanup()
    os._exit(1)


def _serve() -> None:
    from vllm.config.logging import LoggingConfig
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.logger import configure_logging

    from slimqwen.vllm_plugin import vllm_log
    from slimqwen.vllm_plugin.patches import upstream

    # vLLM loads plugins before it configures logging, and a fork does not load them again: log lines would be lost.
    configure_logging(LoggingConfig())
    vllm_log.join()
    upstream.require("own_sockets", of="sockets")
    for number in (signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, _terminate)
    with _own_sockets():
        entry.main()


def _terminate(*_: object) -> None:
    """End as by SIGTERM, the only signal beside Ctrl-C at which vLLM removes what it made."""
    os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn expected errors, and vLLM's exceptions for unusable values, into one line.

    Failures of vLLM's engine are RuntimeErrors and pass.
    """
    try:
        yield
    except SlimqwenError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)
    except (ValueError, KeyError) as error:
        if os.environ.get("VLLM_LOGGING_LEVEL", "").upper() == "DEBUG":
            raise
        from pydantic import ValidationError  # a ValueError

        text = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error.args[0]
        reason = " ".join(": ".join(str(each) for each in (text, error.__cause__) if each).split())
        sys.stderr.write(
            f"error: vLLM refuses its configuration: {reason.rstrip('.')}; change the value in config.env "
            "(VLLM_LOGGING_LEVEL=DEBUG shows where it was refused)\n"
        )
        sys.exit(1)


@contextmanager
def _own_sockets() -> Iterator[None]:
    """Make vLLM put the sockets between its processes, which it does not remove, in a folder that is removed.

    vLLM counts on the system to empty the temporary folder. Remove this function when `get_open_zmq_ipc_path` in
    vllm/utils/network_utils.py puts them in a folder of the server's own.
    """
    if _SOCKETS in os.environ:
        yield
        return
    folders = (tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm")
    parent = next(filter(_takes_sockets, folders), None)
    if parent is None:
        sys.exit(
            f"error: vLLM's sockets need a writable folder whose path has at most {_LONGEST_TEMPORARY_FOLDER} bytes, "
            f"and none of {', '.join(folders)} is one; set TMPDIR to one"
        )
    global _own_folder
    _own_folder = tempfile.TemporaryDirectory(prefix="slimqwen.", dir=parent, ignore_cleanup_errors=True)
    with _own_folder as folder:
        os.environ[_SOCKETS] = folder
        # Until vLLM has a handler of its own.
        before = signal.signal(signal.SIGTERM, _end_without_sockets)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)


def _end_without_sockets(*_: object) -> None:
    """End by SIGTERM as without a handler, but without leaving the folder."""
    if _own_folder is not None:
        _own_folder.cleanup()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


def _takes_sockets(folder: str) -> bool:
    # A socket's path has at most 107 bytes, of which vLLM's name takes 37; TMPDIR of a job can be long.
    return len(os.fsencode(folder)) <= _LONGEST_TEMPORARY_FOLDER and os.access(folder, os.W_OK | os.X_OK)


if __name__ == "__main__":
    main()
