"""The GPUs of eval/devices.yaml: their data sheets, and what their drivers say of them."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from slimqwen.errors import SlimqwenError, suggest_name
from slimqwen.records.record import Block
from slimqwen.records.settings import read_settings

FILE = Path("eval") / "devices.yaml"
"""Relative to the repository."""

CPU = "cpu"
"""Name of the device of a plan for a CPU, which the file does not list."""

Precision = Literal["bf16", "fp8", "int8"]


class UnknownGpuError(SlimqwenError):
    """The GPU is not listed in eval/devices.yaml."""


class Peaks(Block):
    """Dense peak of the matrix units in TFLOP/s; None for a precision without units of its own."""

    bf16: PositiveFloat = Field(description="bfloat16 and float16, TFLOP/s")
    fp8: PositiveFloat | None = Field(None, description="both operands in 8-bit floating point, TFLOP/s")
    int8: PositiveFloat | None = Field(None, description="both operands in 8-bit integers, TOP/s")


class GpuSheet(Block):
    """A GPU's data sheet; the first lines of eval/devices.yaml explain its figures."""

    name: str
    nvidia_smi: tuple[str, ...] = Field(min_length=1, description="product names that nvidia-smi prints")
    memory_bandwidth_gb_per_s: PositiveFloat
    memory_gib: PositiveFloat
    l2_cache_mb: PositiveFloat
    compute_capability: str = Field(pattern=r"^\d+\.\d$")
    dense_peak_tflops: Peaks
    source: str = Field(min_length=1, description="the data sheet")
    note: str | None = None

    @property
    def bandwidth(self) -> float:
        """Memory bandwidth, bytes per second."""
        return self.memory_bandwidth_gb_per_s * 1e9

    @property
    def capability(self) -> tuple[int, int]:
        """Major and minor compute capability."""
        major, _, minor = self.compute_capability.partition(".")
        return int(major), int(minor)

    def peak(self, precision: Precision) -> float:
        """Peak FLOP/s; the 16-bit peak for a precision without units of its own."""
        peaks = self.dense_peak_tflops
        return (getattr(peaks, precision) or peaks.bf16) * 1e12

    @property
    def default_max_num_seqs(self) -> int:
        """Default of vLLM's --max-num-seqs (`EngineArgs.get_batch_defaults`)."""
        is_large = self.memory_gib >= 70 and not any("a100" in name.lower() for name in self.nvidia_smi)
        return 1024 if is_large else 256


class Driver(Block):
    """What the driver says of a GPU."""

    memory_gib: PositiveFloat = Field(description="what CUDA can allocate in all, in 2^30 bytes")
    multiprocessors: PositiveInt
    shared_memory_kib: PositiveInt = Field(description="the most that one block may opt into, in 2^10 bytes")

    @property
    def memory_bytes(self) -> int:
        """What CUDA can allocate in all, bytes."""
        return int(self.memory_gib * 2**30)


class Gpu(GpuSheet):
    """A GPU: its data sheet, which a roofline's record keeps, and its driver."""

    driver: Driver


def read_gpus(root: Path) -> dict[str, Gpu]:
    """All GPUs of a repository's eval/devices.yaml by their short names, such as a10g.

    Raises:
        SettingsError: the file is missing or breaks the schema.
    """
    text = read_settings(root / FILE, root)
    entries = text.validate(dict[str, dict[str, Any]], text.content)
    return text.validate(dict[str, Gpu], {name: {"name": name, **entries[name]} for name in entries})


def read_gpu(name: str, root: Path) -> Gpu:
    """The GPU with a short name.

    Raises:
        SettingsError: as `read_gpus`.
        UnknownGpuError: there is none; the message has a similar name.
    """
    gpus = read_gpus(root)
    if name in gpus:
        return gpus[name]
    raise UnknownGpuError(f"there is no GPU {name!r} in {FILE}; {suggest_name(name, gpus)}")


def find_gpu(shown: str, root: Path) -> Gpu | None:
    """The GPU that nvidia-smi calls `shown`; None if it is not listed. Raises as `read_gpus`."""
    return next((gpu for gpu in read_gpus(root).values() if shown in gpu.nvidia_smi), None)
