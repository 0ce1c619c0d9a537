"""Engine and worker forked from the API server on a CPU, as vLLM does on a GPU, instead of started anew.

vLLM's CPU platform sets `spawn` (`CpuPlatform.check_and_update_config` in vllm/platforms/cpu.py): OpenMP reads its
thread count and its CPUs when it is loaded, and a fork of a process whose OpenMP threads run hangs. So each of the
three processes imports vLLM, one after the other. Here the API server has one OpenMP thread, which is none beside its
own, the worker sets what its environment says after the fork, the engine lets go of the API server's port, and neither
searches what both have inherited for garbage.

Goes away when vLLM's CPU platform leaves the start method to its user, or imports before it starts its processes.
"""

import functools
import gc
import os
from pathlib import Path
from typing import Any

import psutil
import torch

from slimqwen.vllm_plugin.engine_fixes.upstream import expect, expect_parameters

_FIX = "forked_processes"
_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
_CPUS = "GOMP_CPU_AFFINITY"
_THREADS = "OMP_NUM_THREADS"

# An engine in this process replaces torch's.
set_num_threads = torch.set_num_threads
_allowed = False


def allow() -> None:
    """Keep OpenMP to one thread in this process from now on, so that it may be forked.

    To be called before anything has computed in this process.
    """
    global _allowed
    set_num_threads(1)
    _allowed = True


def reason() -> str | None:
    """Why this process needs the fix; None where OpenMP threads may run, or another OpenMP than torch's."""
    if not _allowed or "libgomp" not in os.environ.get("LD_PRELOAD", ""):
        return None
    return "vLLM would be imported three times, one process after the other"


def install() -> bool:
    """Have vLLM fork its engine and its workers; False if it does.

    Raises:
        EngineFixError: the CPU platform takes other parameters, or the processes' main functions are others.
    """
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.executor.multiproc_executor import WorkerProc

    check = CpuPlatform.__dict__["check_and_update_config"].__func__
    if hasattr(check, "__wrapped__"):
        return False
    expect_parameters(_FIX, check, ("cls", "vllm_config"))
    for owner, name in ((EngineCoreProc, "run_engine_core"), (WorkerProc, "worker_main")):
        expect(
            _FIX, isinstance(owner.__dict__.get(name), staticmethod), f"{owner.__name__} has no static {name}"
        )
    run_engine, run_worker = EngineCoreProc.run_engine_core, WorkerProc.worker_main

    @functools.wraps(check)
    def check_and_fork(cls: type, vllm_config: Any) -> None:
        check(cls, vllm_config)
        os.environ[_METHOD] = "fork"

    @functools.wraps(run_engine)
    def run_engine_core(*arguments: Any, **keywords: Any) -> None:
        close_listening_sockets()
        keep_frozen()
        run_engine(*arguments, **keywords)

    @functools.wraps(run_worker)
    def worker_main(*arguments: Any, **keywords: Any) -> None:
        set_threads()
        keep_frozen()
        run_worker(*arguments, **keywords)

    CpuPlatform.check_and_update_config = classmethod(check_and_fork)
    EngineCoreProc.run_engine_core = staticmethod(run_engine_core)
    WorkerProc.worker_main = staticmethod(worker_main)
    return True


def close_listening_sockets() -> None:
    """Close this process's listening TCP sockets, or the API server's port would be taken until the engine ends."""
    with Path(os.devnull).open("rb") as nothing:
        for connection in psutil.Process().net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                # The number stays taken: an object of the API server that holds it must not close another file.
                os.dup2(nothing.fileno(), connection.fd)


def keep_frozen() -> None:
    """Let gc.unfreeze do nothing in this process, or what it has inherited is searched for garbage when it ends.

    vLLM unfreezes for engines inside a process that goes on (`Worker.shutdown`, `EngineCore.shutdown`).
    """
    gc.unfreeze = lambda: None


def set_threads() -> None:
    """Set this process's OpenMP threads and their CPUs to what OpenMP would have read from the environment."""
    # vLLM's executor sets both for the worker that it starts (`OMPProcessManager.configure_omp_envs`).
    if cpus := os.environ.get(_CPUS):
        os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split()})
    cores = min(psutil.cpu_count(logical=False) or 1, len(os.sched_getaffinity(0)))
    set_num_threads(int(os.environ.get(_THREADS) or cores))
