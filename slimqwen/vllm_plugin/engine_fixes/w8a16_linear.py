"""8-bit weights with 16-bit activations on a CPU, on products of torch's own.

vLLM 0.32 has no kernel for them there: of its mixed-precision kernels for the CPU
(`vllm/model_executor/kernels/linear/__init__.py`) none takes uint8b128, and loading such a checkpoint ends in "Failed
to find a kernel". The kernel here is the last of the list, for weights with one scale per row.

Goes away when vLLM brings a W8A16 kernel for CPUs.
"""

import torch

from slimqwen.vllm_plugin.engine_fixes.upstream import expect

_FIX = "w8a16_linear"
_METHODS = frozenset(
    {"get_min_capability", "can_implement", "process_weights_after_loading", "apply_weights"}
)


def reason() -> str:
    """Why this machine needs the fix: every CPU does."""
    return "vLLM has no W8A16 kernel for a CPU: torch's int8 product is used"


def install() -> bool:
    """Put the kernel behind vLLM's kernels for the CPU; False if it is there already.

    Raises:
        EngineFixError: the list of kernels, a kernel's interface or torch's product is gone or has changed.
    """
    from vllm.model_executor.kernels import linear as upstream
    from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel
    from vllm.platforms.interface import PlatformEnum

    from slimqwen.vllm_plugin.engine_fixes.torch_int8 import TorchInt8LinearKernel

    kernels = getattr(upstream, "_POSSIBLE_KERNELS", {}).get(PlatformEnum.CPU)
    expect(_FIX, isinstance(kernels, list), "there is no list of mixed-precision kernels of the CPU")
    assert isinstance(kernels, list)
    if TorchInt8LinearKernel in kernels:
        return False
    methods: frozenset[str] = getattr(MPLinearKernel, "__abstractmethods__", frozenset())
    expect(_FIX, methods == _METHODS, f"an MPLinearKernel must now have {', '.join(sorted(methods))}")
    product = hasattr(torch.ops.aten, "_weight_int8pack_mm")
    expect(_FIX, product, f"torch {torch.__version__} has no aten::_weight_int8pack_mm")
    kernels.append(TorchInt8LinearKernel)
    return True
