"""End a process when the process that it works for ends, even by SIGKILL, and without delay when its work is done.

A lifeline is a pipe or socket whose other end is held only by the process that this one works for. The kernel closes
that end with its holder, and a thread here notices. No signal is needed, so a signal to a process group, which ends
some processes before others, leaves no process behind.
"""

import atexit
import functools
import multiprocessing
import os
import select
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import util
from typing import NoReturn

VARIABLE = "SLIMQWEN_LIFELINE"
"""Environment variable in which a server finds the number of the lifeline's descriptor that it inherited."""


def _exit() -> None:
    os._exit(1)


def watch(*descriptors: int, end: Callable[[], object] = _exit) -> None:
    """Call `end` in a thread as soon as the other end of one of the descriptors is closed.

    Args:
        descriptors: open pipes or sockets; nothing is read from them.
        end: what to call; by default this process exits at once.
    """
    closed = select.poll()
    for descriptor in descriptors:
        closed.register(descriptor, select.POLLRDHUP)  # POLLHUP, which a pipe reports, needs no registration

    def wait() -> None:
        closed.poll()
        end()

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


class ProcessEndsError(KeyboardInterrupt):
    """A KeyboardInterrupt by a signal that ends this process, so that clean-up which its end does anyway is skipped.

    After any other KeyboardInterrupt the process may go on, as in a notebook.
    """


def exit_after(run: Callable[[], object]) -> NoReturn:
    """Call `run`, and end this process with its exit code, without the clean-up of modules at the end of Python.

    With torch and vLLM loaded that clean-up takes 3 s, for which a user would wait after Ctrl-C, and Triton reports
    leaks in it.
    """
    code = 1
    try:
        run()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException as error:
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        sys.excepthook(*sys.exc_info())
    finally:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # its reader is gone
                stream.flush()
        os._exit(code)


@functools.cache
def end_with_parent() -> None:
    """End this process when the parent that started it by `multiprocessing` ends; its forks do the same with theirs.

    Otherwise vLLM's engine would outlive a killed API server, and keep host memory and a GPU's.
    """
    _watch_parent()
    util.register_after_fork(
        watch, _watch_parent
    )  # keeps its first argument weakly, so one that is never deleted


def _watch_parent(_: object = None) -> None:
    if parent := multiprocessing.parent_process():
        watch(parent.sentinel)
