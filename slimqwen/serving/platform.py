"""What this machine can serve, and which flags make no sense without a GPU."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import psutil

Platform = Literal["cpu", "cuda"]

Flags = Mapping[str, Any]
"""Values by flag name, as `slimqwen.serving.flags.Flag.value`."""


@dataclass(frozen=True)
class GpuOnly:
    """A flag that is left out, or replaced, on a CPU.

    Attributes:
        flag: its name without dashes.
        applies: whether this value, beside the other flags, is one that a CPU cannot have.
        instead: the value a CPU takes in its place, None to leave the flag out.
        why: the reason, for the notice.
    """

    flag: str
    applies: Callable[[Any, Flags], bool]
    instead: str | None
    why: str


def detect() -> Platform:
    """Return cuda where torch sees a GPU, else cpu."""
    # Heavy: paid by who asks, as in the two below.
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def has_avx512() -> bool:
    """Whether this CPU has the AVX-512 instructions that some CPU kernels of vLLM need."""
    import torch

    return bool(torch.cpu._is_avx512_supported())


def physical_cores() -> int:
    """Cores of this machine, at least 1: as many OpenMP threads as vLLM's CPU kernels use best."""
    return psutil.cpu_count(logical=False) or 1


def _always(value: Any, flags: Flags) -> bool:
    return True


GPU_ONLY: tuple[GpuOnly, ...] = (
    GpuOnly(
        "dtype",
        lambda value, flags: value not in ("bfloat16", "auto"),
        "bfloat16",
        "Gated DeltaNet on a CPU computes in bfloat16 only",
    ),
    GpuOnly(
        "kv-cache-dtype",
        lambda value, flags: str(value).startswith("fp8") and not has_avx512(),
        None,
        "an FP8 KV cache on a CPU needs AVX-512",
    ),
    GpuOnly("cudagraph-capture-sizes", _always, None, "a CPU has no CUDA graphs"),
    GpuOnly("gpu-memory-utilization", _always, None, "VLLM_CPU_KVCACHE_SPACE sizes the KV cache on a CPU"),
    GpuOnly("kv-cache-memory-bytes", _always, None, "VLLM_CPU_KVCACHE_SPACE sizes the KV cache on a CPU"),
    GpuOnly("attention-backend", _always, None, "a CPU has one attention backend"),
    GpuOnly("compilation-config", _always, None, "its fused kernels exist on CUDA only"),
    GpuOnly(
        "enable-prefix-caching",
        lambda value, flags: bool(value) and bool(flags.get("speculative-config")),
        "0",
        "prefix caching beside MTP needs Triton kernels, which a CPU lacks",
    ),
)
"""The table behind the notice that serving on a CPU prints."""
