"""What tests have `engine_matrix.apart` call in a process of its own."""

import os
import signal
import time

from slimqwen.evaluation.engine_scenarios import EngineMatrixError


def double(weights, folder, task, progress):
    progress("doubling", 1, 2)
    return 2 * task


def raise_error(weights, folder, task, progress):
    progress("greedy", 0, 1)
    raise RuntimeError("sizes do\nnot match")


def refuse(weights, folder, task, progress):
    raise EngineMatrixError("prompts do not fit")


def end_by_signal(weights, folder, task, progress):
    progress("aborts", 0, 1)
    # Else the message may still be on its way.
    time.sleep(0.2)
    os.kill(os.getpid(), getattr(signal, task))


def end_before_it_begins(weights, folder, task, progress):
    os._exit(3)


def hang(weights, folder, task, progress):
    progress("mixed", 0, 1)
    time.sleep(600)
