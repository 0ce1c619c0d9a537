"""GPU data sheets: memory size, memory bandwidth and dense peak FLOP/s of the GPUs in eval/devices.yaml."""

from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveFloat

from slimqwen.errors import SlimqwenError
from slimqwen.plan import gpu_model
from slimqwen.records.record import Block

Precision = Literal["bf16", "fp8", "int8"]


class RooflineError(SlimqwenError):
    """No roofline can be computed for a checkpoint, flags or figures, or a model does not fit on a GPU."""


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

    def peak(self, precision: Precision) -> float:
        """Peak FLOP/s; the 16-bit peak for a precision without units of its own."""
        peaks = self.dense_peak_tflops
        return (getattr(peaks, precision) or peaks.bf16) * 1e12

    @property
    def default_max_num_seqs(self) -> int:
        """Default of vLLM's --max-num-seqs (`EngineArgs.get_batch_defaults`)."""
        is_large = self.memory_gib >= 70 and not any("a100" in name.lower() for name in self.nvidia_smi)
        return 1024 if is_large else 256


def read_gpus(root: Path) -> dict[str, GpuSheet]:
    """All GPUs of eval/devices.yaml by name; raises as `gpu_model.read_devices`."""
    return gpu_model.read_devices(root, dict[str, GpuSheet], leave_out=["driver"])


def read_gpu(name: str, root: Path) -> GpuSheet:
    """One GPU of eval/devices.yaml by its key; raises as `gpu_model.read_devices` and `gpu_model.find_device`."""
    return gpu_model.find_device(read_gpus(root), name)
