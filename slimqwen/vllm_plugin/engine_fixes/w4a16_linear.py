"""4-bit weights with 16-bit activations on torch's own int4 product, on a CPU for which vLLM has no kernel.

vLLM's CPU kernel (`CPUWNA16LinearKernel` in `vllm/model_executor/kernels/linear/mixed_precision/cpu.py`) calls
`cpu_gemm_wna16`, which only the AVX-512 library of vLLM contains. On AVX2 it accepts every layer while loading and
dies at the first request. The kernel here takes its place in the list that vLLM chooses from, so that a layer
which neither can serve is refused while loading, with the reason.

Goes away when the AVX2 library has `cpu_gemm_wna16`, or when vLLM brings another W4A16 kernel for such CPUs.
"""

import torch

from slimqwen.vllm_plugin.engine_fixes.upstream import expect, mixed_precision_kernels

_FIX = "w4a16_linear"
_PRODUCTS = ("_convert_weight_to_int4pack_for_cpu", "_weight_int4pack_mm_for_cpu")


def reason() -> str | None:
    """Why this machine needs the fix; None where the library that vLLM loads has the kernel."""
    from vllm import _custom_ops  # noqa: F401 - loads the library for this CPU

    if hasattr(torch.ops._C, "cpu_gemm_wna16"):
        return None
    return "vLLM's library for this CPU has no W4A16 kernel: torch's int4 product is used"


def install() -> bool:
    """Put the kernel in the place of vLLM's CPU kernel; False if it is there already."""
    from vllm.model_executor.kernels import linear as upstream

    from slimqwen.vllm_plugin.engine_fixes.torch_int4 import TorchInt4LinearKernel

    kernels = mixed_precision_kernels(_FIX, _PRODUCTS)
    if TorchInt4LinearKernel in kernels:
        return False
    stock = getattr(upstream, "CPUWNA16LinearKernel", None)
    expect(
        _FIX, stock in kernels, "the mixed-precision kernels of the CPU do not include CPUWNA16LinearKernel"
    )
    kernels[kernels.index(stock)] = TorchInt4LinearKernel
    return True
