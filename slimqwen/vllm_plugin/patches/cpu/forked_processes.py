"""Fork engine and worker from the API server on a CPU, as vLLM does on a GPU, instead of starting new processes.

vLLM's CPU platform sets `spawn` (`CpuPlatform.check_and_update_config` in vllm/platforms/cpu.py), because OpenMP reads
its number of threads and its CPUs when it is loaded, and a fork of a process with running OpenMP threads hangs. So each
of the three processes imports vLLM, one after the other. With this fix the API server has only one OpenMP thread, its
own; the worker sets threads and CPUs from its environment after the fork; the engine closes the API server's port; and
neither searches the objects that it inherited for garbage.

Remove this fix when vLLM's CPU platform leaves the start method to its user, or imports before it starts its processes.
"""

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from slimqwen.vllm_plugin.patches.upstream import replace

_FIX = "forked_processes"

# An engine that runs in this process replaces torch's function.
set_num_threads = torch.set_num_threads
_allowed = False


def allow() -> None:
    """Limit OpenMP to one thread in this process from now on, so that the process may be forked.

    To be called before anything in this process uses OpenMP.
    """
    global _allowed
    set_num_threads(1)
    _allowed = True


def is_needed() -> bool:
    """Whether this process may be forked: `allow` was called, and libgomp, torch's OpenMP, is preloaded."""
    return _allowed and "libgomp" in os.environ.get("LD_PRELOAD", "")


def install() -> bool:
    """Make vLLM fork its engine and its workers; False if it is installed already in this process."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.executor.multiproc_executor import WorkerProc

    def check_and_fork(stock: Callable[..., None], cls: type, vllm_config: Any) -> None:
        stock(cls, vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        # vLLM has just set this variable. A fork of a process with all imports has inductor's settings of before; they
        # are part of the compile key, so a compile cache would fit one way of starting alone.
        if settings := sys.modules.get("torch._inductor.config"):
            settings.cpp.dynamic_threads = os.environ.get("TORCHINDUCTOR_CPP_DYNAMIC_THREADS") == "1"

    def run_engine(stock: Callable[..., None], *arguments: Any, **keywords: Any) -> None:
        close_listening_sockets()
        keep_frozen()
        stock(*arguments, **keywords)

    def run_worker(stock: Callable[..., None], *arguments: Any, **keywords: Any) -> None:
        set_threads()
        keep_frozen()
        stock(*arguments, **keywords)

    return (
        replace(_FIX, EngineCoreProc, "run_engine_core", run_engine)
        and replace(_FIX, WorkerProc, "worker_main", run_worker)
        and replace(_FIX, CpuPlatform, "check_and_update_config", check_and_fork)
    )


def close_listening_sockets() -> None:
    """Close this process's listening TCP sockets; otherwise the API server's port is taken until the engine ends."""
    with Path(os.devnull).open("rb") as nothing:
        for connection in psutil.Process().net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                # The descriptor stays in use, so that an inherited object which closes it closes no other file.
                os.dup2(nothing.fileno(), connection.fd)


def keep_frozen() -> None:
    """Make gc.unfreeze do nothing in this process; otherwise inherited objects are searched for garbage at its end.

    vLLM unfreezes for the sake of engines in a process that goes on (`Worker.shutdown`, `EngineCore.shutdown`).
    """
    gc.unfreeze = lambda: None


def set_threads() -> None:
    """Set this process's OpenMP threads and their CPUs from the environment, as OpenMP does when it is loaded."""
    # vLLM's executor sets the variables of both for its worker (`OMPProcessManager.configure_omp_envs`).
    if cpus := os.environ.get("GOMP_CPU_AFFINITY"):
        os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split()})
    cores = min(psutil.cpu_count(logical=False) or 1, len(os.sched_getaffinity(0)))
    set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or cores))
