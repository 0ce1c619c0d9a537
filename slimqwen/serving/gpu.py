"""The GPU that a server computes on: the first that CUDA_VISIBLE_DEVICES shows to it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from slimqwen.serving.errors import ServingError
from slimqwen.serving.platform import available_memory

NOTHING: Mapping[str, str] = MappingProxyType({})
"""The environment of a config.env that sets no variable."""

_VISIBLE_DEVICES, _DEVICE_ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"


@dataclass(frozen=True)
class Gpu:
    """A GPU that this process sees.

    Attributes:
        index: device index in torch.
        name: product name, "NVIDIA A40".
        uuid: "GPU-" and a UUID.
        capability: compute capability, "8.6".
        bus: PCI domain, bus and device.
    """

    index: int
    name: str
    uuid: str
    capability: str
    bus: tuple[int, int, int]


def all_gpus() -> list[Gpu]:
    """The GPUs that this process sees, in torch's order; empty without one."""
    # Heavy, and only needed for a GPU.
    import torch

    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        facts = torch.cuda.get_device_properties(index)
        bus = (facts.pci_domain_id, facts.pci_bus_id, facts.pci_device_id)
        gpus.append(Gpu(index, facts.name, f"GPU-{facts.uuid}", f"{facts.major}.{facts.minor}", bus))
    return gpus


def free_and_total_memory(index: int | None) -> tuple[int, int]:
    """Free and total memory, bytes, of the GPU with this index in torch, by default the first."""
    import torch

    free, total = torch.cuda.mem_get_info(index)
    if torch.cuda.is_available() and torch.cuda.get_device_properties(index or 0).is_integrated:
        # CUDA counts the files that the kernel caches in the common memory as used; vLLM does not either.
        free = min(total, available_memory())
    return free, total


def first_visible(environment: Mapping[str, str]) -> Gpu | None:
    """The first GPU of a server with these variables; None where this process sees no GPU.

    Args:
        environment: variables that a config.env adds to this process's.

    Raises:
        ServingError: CUDA_VISIBLE_DEVICES of the config.env names a GPU that this process does not see.
    """
    gpus = all_gpus()
    shell_visible, shell_order = os.environ.get(_VISIBLE_DEVICES), os.environ.get(_DEVICE_ORDER)
    visible = environment.get(_VISIBLE_DEVICES, shell_visible)
    order = environment.get(_DEVICE_ORDER, shell_order)
    if not gpus or (visible == shell_visible and order == shell_order):
        return gpus[0] if gpus else None
    if order == "PCI_BUS_ID":
        gpus.sort(key=lambda gpu: gpu.bus)
    first = (visible or "0").partition(",")[0].strip()
    # The GPUs that this process sees, by the names that the shell's CUDA_VISIBLE_DEVICES gives them.
    if shell_visible:
        names = [name.strip() for name in shell_visible.split(",")]
        by_name = dict(zip(names, sorted(gpus, key=lambda gpu: gpu.index), strict=False))
    else:
        by_name = {str(rank): gpu for rank, gpu in enumerate(gpus)}
    matches = [gpu for gpu in gpus if first.startswith("GPU-") and gpu.uuid.startswith(first)]
    gpu = matches[0] if matches else by_name.get(first)
    if gpu is None:
        raise ServingError(
            f"{_VISIBLE_DEVICES}={visible} of the config.env names {first}, which this shell does not see "
            f"({_VISIBLE_DEVICES}={shell_visible or 'not set'}, {len(gpus)} GPUs); correct it, or export it in the "
            "shell instead"
        )
    return gpu
