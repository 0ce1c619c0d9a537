"""The GPUs of this host as its driver states them: names and memory, without an import of torch or a CUDA context."""

import os
import subprocess
from pathlib import Path
from typing import NamedTuple, NoReturn

import psutil

from slimqwen.plan.devices import (
    DESCRIPTION,
    FILE,
    Gpu,
    UnknownGpuError,
    find_gpu,
    read_gpu,
    refuse_capability,
)

_COLUMNS = ("index", "uuid", "name", "compute_cap", "memory.total", "memory.reserved", "mig.mode.current")
_TIMEOUT_S = 60.0


class ChosenGpu(NamedTuple):
    """The GPU whose memory and speed are computed.

    Attributes:
        gpu: the GPU; if this host has it, with the memory that its driver states.
        here: number of such GPUs that CUDA_VISIBLE_DEVICES leaves to this process.
    """

    gpu: Gpu
    here: int


def choose_gpu(name: str | None, root: Path) -> ChosenGpu | None:
    """Find the GPU with a name or description; without one, this host's first GPU that vLLM has kernels for.

    For a GPU of this host, the memory that CUDA can allocate is nvidia-smi's total less what the driver reserves.

    Args:
        name: a name, or a description such as memory=16,bandwidth=448,capability=8.9 (`read_gpu` says which are known);
            None for a GPU of this host.

    Returns:
        None where no name is given and the host shows no NVIDIA GPU.

    Raises:
        SettingsError: eval/devices.yaml is missing or breaks the schema.
        UnknownGpuError: no GPU or several have the name, or the description is malformed; without a name,
            eval/devices.yaml does not list the host's GPU, and the message has a description to pass instead.
        UnservedGpuError: vLLM has no kernels for the GPU.
    """
    shown = [row for row in _ask_driver() if row.is_visible]
    found = [None if row.is_split else find_gpu(row.name, root, row.memory_gib) for row in shown]
    if name is not None:
        gpu = read_gpu(name, root)
    elif not shown:
        return None
    else:
        served = (gpu for gpu in found if gpu is not None and gpu.is_served)
        gpu = next(served, None) or _refuse(shown[0], found[0])
    same = [row for row, each in zip(shown, found, strict=True) if each == gpu]
    return ChosenGpu(gpu.with_memory(same[0].memory_gib) if same else gpu, len(same))


def _refuse(row: "_Row", listed: Gpu | None) -> NoReturn:
    """Raise the error for a host whose GPUs are not listed, are slices of one, or are too old."""
    refuse_capability(listed.name if listed else row.name, row.capability)
    description = DESCRIPTION.split(",")
    if row.is_split:
        description = [f"memory={row.memory_gib / 2:.0f}", *description[1:2], f"capability={row.capability}"]
        raise UnknownGpuError(
            f"{row.name} of this host is split (MIG), and its driver's figures are of the whole card; describe your "
            f"slice, as in `--gpu {','.join(description)}`"
        )
    description[::2] = f"memory={row.memory_gib:.0f}", f"capability={row.capability}"
    raise UnknownGpuError(
        f"{FILE} does not list {row.name}, the GPU of this host; name its memory bandwidth in GB/s, here 448, as in "
        f"`--gpu {','.join(description)}`"
    )


class _Row(NamedTuple):
    """What nvidia-smi shows of a GPU."""

    number: str
    uuid: str
    name: str
    capability: str
    total: str  # MiB
    reserved: str  # MiB, by the driver itself
    mig: str  # Enabled: the GPU is split, and a process sees a slice of it

    @property
    def is_visible(self) -> bool:
        """Whether CUDA_VISIBLE_DEVICES leaves the GPU to this process."""
        chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
        words = [word.strip() for word in (chosen or "").split(",")]
        return chosen is None or self.number in words or any(w and self.uuid.startswith(w) for w in words)

    @property
    def is_split(self) -> bool:
        """Whether it is split into slices, of which nvidia-smi states no memory here."""
        return self.mig == "Enabled"

    @property
    def memory_gib(self) -> float:
        """What CUDA can allocate, GiB."""
        if not self.total.isdecimal():  # a GPU that shares the host's memory: nvidia-smi prints "[N/A]"
            return psutil.virtual_memory().total / 2**30
        return (int(self.total) - (int(self.reserved) if self.reserved.isdecimal() else 0)) / 2**10


def _ask_driver() -> list[_Row]:
    command = ["nvidia-smi", f"--query-gpu={','.join(_COLUMNS)}", "--format=csv,noheader,nounits"]
    try:
        shown = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = ([cell.strip() for cell in line.split(",")] for line in shown.splitlines())
    # A warning line of nvidia-smi has fewer columns.
    return [_Row(*row) for row in rows if len(row) == len(_COLUMNS)]
