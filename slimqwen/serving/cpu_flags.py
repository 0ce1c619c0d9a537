"""The flags that serving on a CPU leaves out or replaces."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slimqwen import host


@dataclass(frozen=True)
class GpuOnly:
    """A flag that serving on a CPU leaves out or replaces.

    Attributes:
        flag: name of the flag without dashes.
        applies: function from a value of the flag to whether a CPU cannot serve with it.
        instead: value on a CPU; None to leave the flag out.
        why: the reason, for the notice.
    """

    flag: str
    applies: Callable[[Any], bool]
    instead: str | None
    why: str


NO_FLOAT16 = "Gated DeltaNet on a CPU computes in bfloat16 only"
"""Why another dtype than bfloat16 is replaced on a CPU."""


def _always(value: Any) -> bool:
    return True


GPU_ONLY: tuple[GpuOnly, ...] = (
    GpuOnly(
        "dtype",
        lambda value: value not in ("bfloat16", "auto"),
        "bfloat16",
        NO_FLOAT16,
    ),
    GpuOnly(
        "kv-cache-dtype",
        lambda value: str(value).startswith("fp8") and not host.has_avx512(),
        None,
        "an FP8 KV cache on a CPU needs AVX-512",
    ),
    GpuOnly("cudagraph-capture-sizes", _always, None, "a CPU has no CUDA graphs"),
    GpuOnly("gpu-memory-utilization", _always, None, "VLLM_CPU_KVCACHE_SPACE sizes the KV cache on a CPU"),
    GpuOnly("kv-cache-memory-bytes", _always, None, "VLLM_CPU_KVCACHE_SPACE sizes the KV cache on a CPU"),
    GpuOnly("attention-backend", _always, None, "a CPU has one attention backend"),
    GpuOnly("compilation-config", _always, None, "the fused kernels exist on CUDA only"),
)
"""The flags that a CPU leaves out or replaces; serving on a CPU prints each of them."""
