"""End a process together with the process that it works for, however that ends.

A lifeline is a pipe or socket whose other end that process alone holds. The kernel closes the other end with its
holder, after SIGKILL too, and a thread here sees it. Nothing depends on a signal, so one to a process group, which
ends some processes before others, leaves none behind.
"""

import functools
import multiprocessing
import os
import select
import threading
from collections.abc import Callable
from multiprocessing import util

VARIABLE = "SLIMQWEN_LIFELINE"
"""Environment variable with the number of a server's inherited descriptor."""


def _exit() -> None:
    os._exit(1)


def watch(*descriptors: int, end: Callable[[], object] = _exit) -> None:
    """Call a function in a thread as soon as the other end of one of the descriptors is closed. Nothing is read."""
    closed = select.poll()
    for descriptor in descriptors:
        closed.register(descriptor, select.POLLRDHUP)  # POLLHUP, which a pipe reports, needs no registration

    def wait() -> None:
        closed.poll()
        end()

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


@functools.cache
def end_with_parent() -> None:
    """End this process with its parent if `multiprocessing` started it, and the processes that it starts with this one.

    vLLM's engine outlives a killed API server, and keeps its own memory and a GPU's.
    """
    _watch_parent()
    util.register_after_fork(watch, _watch_parent)  # held weakly, so an object that stays


def _watch_parent(_: object = None) -> None:
    if parent := multiprocessing.parent_process():
        watch(parent.sentinel)
