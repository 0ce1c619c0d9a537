"""Multiply unquantised linears in float32, on a CPU without bfloat16 instructions.

Such a CPU multiplies 16-bit matrices in a time that grows with every row. On AVX2 oneDNN refuses them, vLLM warns
"Failed to create oneDNN linear" and falls back to torch's own product: 512 rows of a [3584, 1024] layer take 225 ms
instead of 32 ms in float32, 5 rows 2.6 ms instead of 1.1 ms, but a single row 0.5 ms instead of 0.9 ms (2 AVX2 cores).
On AVX-512 oneDNN takes them: 512 rows of a [1536, 576] layer 18 ms instead of 3.8 ms, 4 rows 0.28 ms instead of
0.14 ms, but a single row 0.07 ms instead of 0.13 ms (2 AVX-512 cores).

With this fix oneDNN packs the weights of such a layer in float32 and multiplies there; inputs and results stay 16-bit.
Where oneDNN takes 16 bits it keeps them beside, for single rows, which are bound by the bytes of the weights. All ways
accumulate in float32. The weights of these layers take twice the memory, or three times (`weight_bytes`;
`serving/checks.py` counts it).

Remove this fix when oneDNN multiplies many rows in 16 bits on such CPUs as fast as in float32.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from slimqwen.vllm_plugin.patches.upstream import replace

_FIX = "widened_linears"
_BLOCK_ROWS = 512
"""Most rows that are multiplied at once: the logits of a long prompt in float32 would take gigabytes."""

_NARROW = (torch.bfloat16, torch.float16)


def is_needed() -> bool:
    """Whether this CPU has no bfloat16 instructions, and a oneDNN that would use them."""
    has_onednn = torch.backends.mkldnn.is_available() and torch.cpu._is_avx2_supported()
    return has_onednn and not torch.cpu._is_avx512_bf16_supported()


def weight_bytes(dtype: torch.dtype, *, single_rows: bool = True) -> int:
    """Bytes that a weight of a linear takes in oneDNN on this CPU, with or without the form for single rows."""
    if dtype not in _NARROW or not is_needed():
        return int(dtype.itemsize)
    keeps_narrow = single_rows and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return 4 + (int(dtype.itemsize) if keeps_narrow else 0)


def _multiply(
    rows: torch.Tensor,
    bias: torch.Tensor | None,
    outputs: int,
    narrow: torch.Tensor | None,
    wide: torch.Tensor,
) -> torch.Tensor:
    """Multiply: [rows, inputs], bias [outputs], numbers of oneDNN's handlers -> [rows, outputs]."""
    if narrow is not None and len(rows) == 1:
        product = rows.new_empty(1, outputs)
        torch.ops._C.onednn_mm(product, rows, bias, narrow)
        return product
    product = rows.new_empty(len(rows), outputs)
    wide_bias = None if bias is None else bias.float()
    for block, result in zip(rows.split(_BLOCK_ROWS), product.split(_BLOCK_ROWS), strict=True):
        wide_result = result.new_empty(result.shape, dtype=torch.float32)
        torch.ops._C.onednn_mm(wide_result, block.float(), wide_bias, wide)
        result.copy_(wide_result)
    return product


def _shape(rows: torch.Tensor, bias: Any, outputs: int, *handlers: Any) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], outputs)


# A registered operator: vLLM compiles one graph for all numbers of rows, so the choice must not be part of the graph.
_LIBRARY = torch.library.Library("slimqwen", "FRAGMENT")
_LIBRARY.define(
    "widened_linear(Tensor rows, Tensor? bias, int outputs, Tensor? narrow, Tensor wide) -> Tensor"
)
_LIBRARY.impl("widened_linear", _multiply, "CPU")
_LIBRARY.impl("widened_linear", _shape, "Meta")


def install() -> bool:
    """Make vLLM keep the weights of 16-bit linears in float32, too, and multiply with these.

    Returns:
        False if it is installed already in this process.
    """
    from vllm import _custom_ops

    def create_onednn_mm(stock: Callable[..., Any], weight: Any, primitive_cache_size: int = 128) -> Any:
        is_narrow = weight.dtype in _NARROW
        handler = stock(weight.float() if is_narrow else weight, primitive_cache_size)
        handler.is_widened = is_narrow
        handler.narrow = None
        if is_narrow and weight_bytes(weight.dtype) > 4:
            # oneDNN takes bfloat16 on more CPUs than float16.
            with suppress(RuntimeError):
                handler.narrow = stock(weight, primitive_cache_size)
        return handler

    def onednn_mm(stock: Callable[..., Any], dnnl_handler: Any, x: Any, bias: Any) -> Any:
        if not dnnl_handler.is_widened:
            return stock(dnnl_handler, x, bias)
        narrow = None if dnnl_handler.narrow is None else dnnl_handler.narrow.handler_tensor
        rows = x.reshape(-1, dnnl_handler.k)
        product = torch.ops.slimqwen.widened_linear(
            rows, bias, dnnl_handler.n, narrow, dnnl_handler.handler_tensor
        )
        return product.reshape(*x.shape[:-1], dnnl_handler.n)

    is_new = replace(_FIX, _custom_ops, "create_onednn_mm", create_onednn_mm)
    return replace(_FIX, _custom_ops, "onednn_mm", onednn_mm) or is_new
