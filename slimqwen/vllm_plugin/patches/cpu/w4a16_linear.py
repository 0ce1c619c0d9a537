"""Compute W4A16 linears with torch's own int4 product, on a CPU for which vLLM has no kernel.

vLLM's CPU kernel (`CPUWNA16LinearKernel` in `vllm/model_executor/kernels/linear/mixed_precision/cpu.py`) calls
`cpu_gemm_wna16`, which is only in vLLM's library for AVX-512. On AVX2 the kernel accepts every layer while loading and
dies at the first request. The kernel of this fix replaces it in the list from which vLLM chooses, so that a layer which
neither supports is refused while loading, with the reason.

Remove this fix when the AVX2 library has `cpu_gemm_wna16`, or when vLLM has another W4A16 kernel for such CPUs.
"""

from typing import Any

import torch
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import (
    MPLinearKernel,
    MPLinearLayerConfig,
)
from vllm.model_executor.layers.quantization.utils import replace_parameter
from vllm.model_executor.layers.quantization.utils.quant_utils import unpack_quantized_values_into_int32
from vllm.scalar_type import scalar_types

from slimqwen.vllm_plugin.patches.upstream import expect, mixed_precision_kernels

_FIX = "w4a16_linear"
_PRODUCTS = ("_convert_weight_to_int4pack_for_cpu", "_weight_int4pack_mm_for_cpu")
_MIDDLE = 8  # torch's product reads the four bits of a weight as value + 8
_WEIGHT_TYPES = (scalar_types.uint4b8, scalar_types.uint4)  # symmetric, with zero points
_ACTIVATIONS = (torch.bfloat16, torch.float16, torch.float32)
_GROUP_SIZES = (32, 64, 128, 256)  # those for which aten::_weight_int4pack_mm_for_cpu is compiled
_OUTPUT_BLOCK = 16  # number of outputs that aten::_convert_weight_to_int4pack_for_cpu interleaves


def pack(
    values: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack quantised weights, which mean (value - zero point) x scale, as torch's int4 product needs them.

    Args:
        values: [outputs, inputs], integers 0..15.
        scales: [outputs, groups].
        zero_points: [outputs, groups], integers 0..15; None means 8 everywhere.
        dtype: dtype of the activations.

    Returns:
        The packed values, uint8 [outputs, inputs / 2]; and scale and offset (8 - zero point) x scale of each group and
        output, `dtype` [groups, outputs, 2].
    """
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values.to(torch.int32).contiguous(), 1)
    offsets = torch.zeros_like(scales) if zero_points is None else (_MIDDLE - zero_points) * scales.float()
    both = torch.stack([scales.to(dtype), offsets.to(dtype)], dim=-1)
    return packed, both.transpose(0, 1).contiguous()


class TorchInt4LinearKernel(MPLinearKernel):  # type: ignore[misc] # vLLM is not followed
    """W4A16 linear layers on `aten::_weight_int4pack_mm_for_cpu`, which accumulates in float32."""

    @classmethod
    def get_min_capability(cls) -> int:
        """The least compute capability of a GPU: -1, as none is needed."""
        return -1

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        """Whether the kernel supports a layer; if not, the reason, which vLLM shows while it loads the model."""
        inputs, outputs = c.partition_weight_shape
        group = inputs if c.group_size == -1 else c.group_size
        if c.weight_type not in _WEIGHT_TYPES:
            return False, f"weights are {c.weight_type}, not uint4b8 or uint4"
        if c.zero_points != (c.weight_type == scalar_types.uint4):
            return False, f"weights are {c.weight_type} {'with' if c.zero_points else 'without'} zero points"
        if c.act_type not in _ACTIVATIONS:
            return False, f"activations are {c.act_type}, not bfloat16, float16 or float32"
        if group not in _GROUP_SIZES:
            return False, f"the group size is {group}, not one of {', '.join(map(str, _GROUP_SIZES))}"
        if inputs % group:
            return False, f"{inputs} inputs are not a multiple of the group size {group}"
        if outputs % _OUTPUT_BLOCK:
            return False, f"{outputs} outputs are not a multiple of {_OUTPUT_BLOCK}"
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Repack a loaded layer in place; its parameter of scales then has scales and offsets (`pack`)."""
        weight, scale, zero = self._get_weight_params(layer)
        zero_points = self._integers(zero) if self.config.zero_points else None
        scales = scale.data if scale.output_dim == 0 else scale.data.t()
        packed, scales_and_offsets = pack(self._integers(weight), scales, zero_points, self.config.act_type)
        replace_parameter(layer, self.w_q_name, torch.nn.Parameter(packed, requires_grad=False))
        replace_parameter(layer, self.w_s_name, torch.nn.Parameter(scales_and_offsets, requires_grad=False))
        if zero is not None:
            setattr(layer, self.w_zp_name, None)

    def _integers(self, parameter: Any) -> torch.Tensor:
        """Unpack an int32 parameter of either layout to integers 0..15, [outputs, inputs or groups]."""
        unpacked = unpack_quantized_values_into_int32(
            parameter.data, self.config.weight_type, parameter.packed_dim
        )
        return unpacked if parameter.output_dim == 0 else unpacked.t()

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiply: [..., inputs] -> [..., outputs], in the dtype of the activations."""
        packed, scales_and_offsets, _ = self._get_weight_params(layer)
        group = x.shape[-1] // scales_and_offsets.shape[0]
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        product = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, packed, group, scales_and_offsets)
        product = product.reshape(*x.shape[:-1], product.shape[-1])
        return product if bias is None else product + bias


def is_needed() -> bool:
    """Whether the library that vLLM loads on this CPU lacks its W4A16 kernel."""
    from vllm import _custom_ops  # noqa: F401 - loads the library

    return not hasattr(torch.ops._C, "cpu_gemm_wna16")


def install() -> bool:
    """Replace vLLM's CPU kernel by the kernel of this fix; False if it is replaced already."""
    from vllm.model_executor.kernels import linear as upstream

    kernels = mixed_precision_kernels(_FIX, _PRODUCTS)
    if any(issubclass(kernel, TorchInt4LinearKernel) for kernel in kernels):
        return False
    stock = getattr(upstream, "CPUWNA16LinearKernel", None)
    expect(
        _FIX, stock in kernels, "the mixed-precision kernels of the CPU do not include CPUWNA16LinearKernel"
    )
    kernels[kernels.index(stock)] = TorchInt4LinearKernel
    return True
