"""8-bit weights with 16-bit activations on a CPU, on products of torch's own.

vLLM 0.32 has no kernel for them there: of its mixed-precision kernels for the CPU
(`vllm/model_executor/kernels/linear/__init__.py`) none takes uint8b128, and loading such a checkpoint ends in "Failed
to find a kernel". The kernel here is the last of the list, for weights with one scale per row.

Goes away when vLLM brings a W8A16 kernel for CPUs.
"""

from slimqwen.vllm_plugin.engine_fixes.upstream import mixed_precision_kernels

_FIX = "w8a16_linear"


def reason() -> str:
    """Why this machine needs the fix: every CPU does."""
    return "vLLM has no W8A16 kernel for a CPU: torch's int8 product is used"


def install() -> bool:
    """Put the kernel behind vLLM's kernels for the CPU; False if it is there already."""
    from slimqwen.vllm_plugin.engine_fixes.torch_int8 import TorchInt8LinearKernel

    kernels = mixed_precision_kernels(_FIX, ("_weight_int8pack_mm",))
    if TorchInt8LinearKernel in kernels:
        return False
    kernels.append(TorchInt8LinearKernel)
    return True
