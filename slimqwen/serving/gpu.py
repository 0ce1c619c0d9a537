"""The GPUs that this process sees; a server computes on the first, because a config.env cannot choose one."""

import time
from dataclasses import dataclass

from slimqwen.host import available_memory

_POLL_S = 0.2
_SETTLED_S = 3.0


@dataclass(frozen=True)
class CudaDevice:
    """A GPU that this process sees.

    Attributes:
        index: device index in torch.
        name: product name, such as "NVIDIA A40".
        capability: compute capability, such as "8.6".
        memory_gib: what CUDA can allocate in all, in 2^30 bytes.
    """

    index: int
    name: str
    capability: str
    memory_gib: float


def all_gpus() -> list[CudaDevice]:
    """The GPUs that this process sees, in torch's order; empty without one."""
    # Slow to import, and only needed for a GPU.
    import torch

    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        facts = torch.cuda.get_device_properties(index)
        memory_gib = facts.total_memory / 2**30
        gpus.append(CudaDevice(index, facts.name, f"{facts.major}.{facts.minor}", memory_gib))
    return gpus


def first_gpu() -> CudaDevice | None:
    """The GPU that a server started from this process computes on; None without one."""
    return next(iter(all_gpus()), None)


def free_and_total_memory() -> tuple[int, int]:
    """Free and total memory of the first GPU, bytes."""
    import torch

    free, total = torch.cuda.mem_get_info(0)
    if torch.cuda.get_device_properties(0).is_integrated:
        # On a GPU that shares the host's memory CUDA counts cached files as used memory; vLLM does not, nor do we.
        free = min(total, available_memory())
    return free, total


def await_free_memory(needed: int) -> int:
    """Wait until `needed` bytes are free on the first GPU, or free memory has not grown for three seconds.

    The driver frees the memory of a process some time after the process has ended.

    Returns:
        Free memory, bytes; less than `needed` if waiting did not help.
    """
    free, _ = free_and_total_memory()
    grew = time.monotonic()
    while free < needed and time.monotonic() - grew < _SETTLED_S:
        time.sleep(_POLL_S)
        now, _ = free_and_total_memory()
        if now > free:
            grew = time.monotonic()
        free = now
    return free
