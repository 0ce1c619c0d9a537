"""Multiply unquantised linears in float32, on a CPU whose matrix library has no 16-bit products.

oneDNN multiplies bfloat16 and float16 only from AVX-512 on. On AVX2 vLLM warns "Failed to create oneDNN linear" and
falls back to torch's own 16-bit product, whose time grows with every row: 512 rows of a [3584, 1024] layer take 225 ms
instead of 32 ms in float32, 5 rows 2.6 ms instead of 1.1 ms, but a single row 0.5 ms instead of 0.9 ms (2 AVX2 cores).

With this fix oneDNN packs the weights of such a layer in float32 and multiplies there; inputs and results stay 16-bit.
Both ways accumulate in float32. The weights of these layers take twice the memory (`serving/checks.py` counts it).

Remove this fix when oneDNN multiplies 16-bit matrices on plain AVX2.
"""

from collections.abc import Callable
from typing import Any

from slimqwen.vllm_plugin.patches.upstream import replace

_FIX = "widened_linears"


def is_needed() -> bool:
    """Whether oneDNN refuses bfloat16 on this CPU."""
    import torch

    return torch.backends.mkldnn.is_available() and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def install() -> bool:
    """Make vLLM convert weights (when they are packed) and inputs of 16-bit linears to float32; False if it does."""
    import torch
    from vllm import _custom_ops

    def create_onednn_mm(stock: Callable[..., Any], weight: Any, primitive_cache_size: int = 128) -> Any:
        is_narrow = weight.dtype in (torch.bfloat16, torch.float16)
        handler = stock(weight.float() if is_narrow else weight, primitive_cache_size)
        handler.is_widened = is_narrow
        return handler

    def onednn_mm(stock: Callable[..., Any], dnnl_handler: Any, x: Any, bias: Any) -> Any:
        if not dnnl_handler.is_widened:
            return stock(dnnl_handler, x, bias)
        return stock(dnnl_handler, x.float(), None if bias is None else bias.float()).to(x.dtype)

    is_new = replace(_FIX, _custom_ops, "create_onednn_mm", create_onednn_mm)
    return replace(_FIX, _custom_ops, "onednn_mm", onednn_mm) or is_new
