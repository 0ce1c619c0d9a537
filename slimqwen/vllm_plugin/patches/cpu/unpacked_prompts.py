"""Multiply prompts with weights that were unpacked while loading, on a CPU.

A packed product unpacks the weights anew for every few rows. Decoding has few rows and gains, because it reads a
quarter or half of the bytes; a prompt has many and loses: 2,048 rows of a [3584, 1024] layer take 84 ms as oneDNN's
bfloat16 product, 165 ms in vLLM's 4-bit kernel and 216 ms in torch's 8-bit one (2 AVX-512 BF16 cores).

With this fix a packed linear keeps its weights a second time, unpacked in the dtype of the activations, and a step with
more than 16 rows is multiplied with these. They are rounded as the packed product rounds them or finer, and both
products accumulate in float32. Each layer is unpacked where, after it and the KV cache, a quarter of the memory of the
host or its container stays free. A 4-bit layer that is not is unpacked for each step of 1,024 rows or more, and its
copy dropped; `w8a16_linear` does so for 8 bits. Output heads are never unpacked: a prompt needs one row of theirs.

`SLIMQWEN_UNPACK=0` switches the fix off. Stages of recipes set it, since their output must not depend on free memory.

Remove this fix when vLLM's packed kernels for a CPU are as fast as its 16-bit product at 2,048 rows.
"""

import functools
import itertools
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakValueDictionary

import psutil
import torch
from vllm.model_executor.layers.quantization.utils.quant_utils import unpack_quantized_values_into_int32

from slimqwen import cgroup
from slimqwen.vllm_plugin.patches.cpu import widened_linears
from slimqwen.vllm_plugin.patches.upstream import expect, mixed_precision_kernels

logger = logging.getLogger(__name__)

_FIX = "unpacked_prompts"
VARIABLE = "SLIMQWEN_UNPACK"
_FEW_ROWS = 16  # up to this number packed products are as fast or faster
_MANY_ROWS = 1024  # from this number unpacking for a single step pays
_SPARE = 0.25  # share of the memory that stays free after load
_BLOCK = 16  # outputs in a block of `CPUWNA16LinearKernel`
_VALUES = 8  # 4-bit values in an int32

_numbers = itertools.count(1)
# oneDNN's handlers by the number of their layer, which owns them.
_unpacked: "WeakValueDictionary[int, Any]" = WeakValueDictionary()


def is_needed() -> bool:
    """Whether the fix is on: `SLIMQWEN_UNPACK` is not 0."""
    return os.environ.get(VARIABLE) != "0"


def install() -> bool:
    """Replace vLLM's packed kernels for the CPU by subclasses that also unpack.

    Returns:
        False if it is installed already in this process.
    """
    from vllm import _custom_ops

    expect(_FIX, hasattr(_custom_ops, "create_onednn_mm"), "vLLM has no oneDNN product")
    kernels = mixed_precision_kernels(_FIX, ())
    if any(hasattr(kernel, "packed_product") for kernel in kernels):
        return False
    known = [place for place, kernel in enumerate(kernels) if kernel.__name__ in _PRODUCTS]
    expect(_FIX, bool(known), "no packed kernel for the CPU is known")
    for place in known:
        kernels[place] = unpacking(kernels[place])
    return True


def unpacking(kernel: Any) -> Any:
    """Make a subclass of a packed kernel, of the same name, that multiplies many rows with unpacked weights."""

    class Unpacking(kernel):  # type: ignore[misc] # vLLM is not followed
        packed_product = kernel.__name__

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            _load(super().process_weights_after_loading, self, layer)

        def apply_weights(
            self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            if not hasattr(layer, "unpacked_number"):
                result: torch.Tensor = super().apply_weights(layer, x, bias)
                return result
            return _apply(self, layer, x, bias)

    Unpacking.__name__ = kernel.__name__
    return Unpacking


def unpack(kernel: Any, layer: torch.nn.Module) -> torch.Tensor:
    """Unpack a layer that is loaded and not yet repacked: [outputs, inputs] in the dtype of the activations."""
    config = kernel.config
    weight, scale, zero = kernel._get_weight_params(layer)
    values = _integers(weight, config.weight_type)
    scales = scale.data.t() if getattr(scale, "output_dim", 0) else scale.data
    zeros: Any = _integers(zero, config.weight_type) if config.zero_points else config.weight_type.bias
    if isinstance(zeros, torch.Tensor):
        zeros = zeros.unsqueeze(2)
    grouped = values.view(*scales.shape, -1) if scales.dim() == 2 else values.view(len(values), 1, -1)
    matrix = (grouped - zeros) * scales.reshape(*grouped.shape[:2], 1).float()
    return matrix.view(values.shape).to(config.act_type)


def _integers(parameter: Any, weight_type: Any) -> torch.Tensor:
    """Unpack an int32 parameter of either layout to [outputs, inputs or groups]."""
    integers = unpack_quantized_values_into_int32(parameter.data, weight_type, parameter.packed_dim)
    return (integers if parameter.output_dim == 0 else integers.t()).contiguous()


def _load(stock: Callable[..., Any], kernel: Any, layer: torch.nn.Module) -> None:
    """Repack a layer as the kernel does, and keep its weights unpacked beside that if memory allows."""
    from vllm import _custom_ops
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    if isinstance(layer, VocabParallelEmbedding):
        stock(layer)
        return
    inputs, outputs = kernel.config.partition_weight_shape
    handler = None
    if has_room(inputs * outputs * widened_linears.weight_bytes(kernel.config.act_type, single_rows=False)):
        with suppress(
            RuntimeError
        ):  # oneDNN knows float16 on few CPUs; vLLM's own linears then use torch, too
            handler = _custom_ops.create_onednn_mm(unpack(kernel, layer).t(), 32)
            handler.narrow = None  # single rows are multiplied with the packed weights
    stock(layer)
    if getattr(layer, "use_w4a8", False):  # activations of 8 bits were asked for
        return
    number = next(_numbers)
    if handler is not None:
        _unpacked[number] = handler
    layer.unpacked_handler = handler
    # A tensor, because a number would be part of the compiled graph, which has to fit every process.
    layer.register_buffer("unpacked_number", torch.tensor([number], dtype=torch.int64), persistent=False)


def _apply(kernel: Any, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    weight, scale, zero = kernel._get_weight_params(layer)
    outputs = kernel.config.partition_weight_shape[1]
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    product: torch.Tensor = torch.ops.slimqwen.packed_linear(
        rows, layer.unpacked_number, weight, scale, zero, bias, outputs, kernel.packed_product
    )
    return product.reshape(*x.shape[:-1], outputs)


def has_room(needed: int) -> bool:
    """Whether a quarter of the memory stays free after `needed` more bytes and the KV cache."""
    host = psutil.virtual_memory()
    available = min(host.available, cgroup.available_memory())
    room = available - _kv_cache_bytes() - _SPARE * min(host.total, cgroup.memory_limit())
    if needed > room:
        _log_lack_of_memory()
    return needed <= room


def _kv_cache_bytes() -> int:
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    return int((config and config.cache_config.kv_cache_memory_bytes) or 0)


@functools.cache
def _log_lack_of_memory() -> None:
    logger.info("Too little memory is free to keep every packed linear unpacked: prompts take longer")


def _linear(
    rows: torch.Tensor,
    unpacked: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    bias: torch.Tensor | None,
    outputs: int,
    kernel: str,
) -> torch.Tensor:
    from vllm import _custom_ops

    if len(rows) <= _FEW_ROWS:
        return _PRODUCTS[kernel](rows, weight, scale, zero, bias)
    handler = _unpacked.get(int(unpacked))
    if handler is not None:
        product: torch.Tensor = _custom_ops.onednn_mm(handler, rows, bias)
        return product
    if len(rows) >= _MANY_ROWS and kernel == "CPUWNA16LinearKernel":
        return torch.nn.functional.linear(rows, unpack_blocks(weight, scale, zero), bias)
    return _PRODUCTS[kernel](rows, weight, scale, zero, bias)


def unpack_blocks(weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None) -> torch.Tensor:
    """Unpack weights that `CPUWNA16LinearKernel` has repacked.

    Args:
        weight: int32 [outputs / 16, inputs x 2], the 16 outputs of a block together.
        scale: [groups, outputs].
        zero: int32 [groups, outputs / 8]; None means 8 everywhere.

    Returns:
        [outputs, inputs] in the dtype of the scales.
    """
    groups, outputs = scale.shape
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    nibbles = (weight.view(outputs // _BLOCK, groups, -1, _BLOCK // _VALUES, 1) >> shifts) & 15
    grouped = nibbles.to(scale.dtype).view(outputs // _BLOCK, groups, -1, _BLOCK)
    zeros = 8 if zero is None else ((zero.unsqueeze(2) >> shifts) & 15).view(groups, 1, outputs)
    if isinstance(zeros, torch.Tensor):
        zeros = zeros.to(scale.dtype).view(groups, -1, _BLOCK).transpose(0, 1).unsqueeze(2)
    scales = scale.view(groups, -1, _BLOCK).transpose(0, 1).unsqueeze(2)
    return ((grouped - zeros) * scales).permute(0, 3, 1, 2).reshape(outputs, -1)


def _wna16(
    rows: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    from vllm import _custom_ops
    from vllm.model_executor.kernels.linear.mixed_precision import cpu

    product: torch.Tensor = _custom_ops.cpu_gemm_wna16(
        input=rows,
        q_weight=weight,
        scales=scale,
        zeros=zero,
        bias=bias,
        pack_factor=_VALUES,
        isa_hint=cpu._get_isa_hint(scale.dtype),
    )
    return product


def _int4(
    rows: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    _: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    group = rows.shape[1] // scale.shape[0]
    product: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, weight, group, scale)
    return product if bias is None else product + bias


def _int8(
    rows: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    _: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    product: torch.Tensor = torch.ops.slimqwen.int8_linear(rows, weight, scale)
    return product if bias is None else product + bias


_PRODUCTS = {
    "CPUWNA16LinearKernel": _wna16,
    "TorchInt4LinearKernel": _int4,
    "TorchInt8LinearKernel": _int8,
}


def _shape(rows: torch.Tensor, *others: Any) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], others[-2])


# A registered operator: vLLM compiles one graph for all numbers of rows, so the choice must not be part of the graph.
_LIBRARY = torch.library.Library("slimqwen", "FRAGMENT")
_LIBRARY.define(
    "packed_linear(Tensor rows, Tensor unpacked, Tensor weight, Tensor scale, Tensor? zero, Tensor? bias, int outputs, "
    "str kernel) -> Tensor"
)
_LIBRARY.impl("packed_linear", _linear, "CPU")
_LIBRARY.impl("packed_linear", _shape, "Meta")
