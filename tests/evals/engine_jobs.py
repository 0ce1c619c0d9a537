"""Functions that the tests of `EngineProcesses` call in a process of its own."""

import os
import signal
import time

from slimqwen.evals import EvalError


def double(weights, task, progress):
    progress("doubling", 1, 2)
    return 2 * task


def raise_error(weights, task, progress):
    progress("alone", 0, 1)
    raise RuntimeError("sizes do\nnot match")


def refuse(weights, task, progress):
    raise EvalError("prompts do not fit")


def end_by_signal(weights, task, progress):
    progress("cached", 0, 1)
    # Else the message may still be on its way.
    time.sleep(0.2)
    os.kill(os.getpid(), getattr(signal, task))


def end_before_it_begins(weights, task, progress):
    os._exit(3)


def hang(weights, task, progress):
    progress("together", 0, 1)
    time.sleep(600)


def variables(weights, task, progress):
    import torch

    progress("looking", 0, 1)
    return (torch.get_num_threads(), *(os.environ.get(name) for name in task))
