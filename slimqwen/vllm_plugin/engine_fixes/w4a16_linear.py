"""4-bit weights with 16-bit activations on torch's own int4 product, on a CPU for which vLLM has no kernel.

vLLM's CPU kernel (`CPUWNA16LinearKernel` in `vllm/model_executor/kernels/linear/mixed_precision/cpu.py`) calls
`cpu_gemm_wna16`, which only the AVX-512 library of vLLM contains. On AVX2 it accepts every layer while loading and
dies at the first request. The kernel here takes its place in the list that vLLM chooses from, so that a layer
which neither can serve is refused while loading, with the reason.

Goes away when the AVX2 library has `cpu_gemm_wna16`, or when vLLM brings another W4A16 kernel for such CPUs.
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

from slimqwen.vllm_plugin.engine_fixes.upstream import expect, mixed_precision_kernels

_FIX = "w4a16_linear"
WHY = "vLLM's library for this CPU has no W4A16 kernel: torch's int4 product is used"
_PRODUCTS = ("_convert_weight_to_int4pack_for_cpu", "_weight_int4pack_mm_for_cpu")
_MIDDLE = 8  # torch's product takes a weight's four bits as value + 8
_WEIGHT_TYPES = (scalar_types.uint4b8, scalar_types.uint4)  # symmetric, with zero points
_ACTIVATIONS = (torch.bfloat16, torch.float16, torch.float32)
_GROUP_SIZES = (32, 64, 128, 256)  # what aten::_weight_int4pack_mm_for_cpu is compiled for
_OUTPUT_BLOCK = 16  # what aten::_convert_weight_to_int4pack_for_cpu interleaves


def pack(
    values: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bring quantised weights, which stand for (value - zero point) x scale, into the form of torch's product.

    Args:
        values: [outputs, inputs], integers 0..15.
        scales: [outputs, groups].
        zero_points: [outputs, groups], integers 0..15; None means 8 everywhere.
        dtype: the activations' dtype.

    Returns:
        The packed values, [outputs, inputs / 2] uint8, and for each group and output the scale and the offset
        (8 - zero point) x scale, [groups, outputs, 2] of `dtype`.
    """
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values.to(torch.int32).contiguous(), 1)
    offsets = torch.zeros_like(scales) if zero_points is None else (_MIDDLE - zero_points) * scales.float()
    both = torch.stack([scales.to(dtype), offsets.to(dtype)], dim=-1)
    return packed, both.transpose(0, 1).contiguous()


class TorchInt4LinearKernel(MPLinearKernel):  # type: ignore[misc] # vLLM is not followed
    """W4A16 linear layers on `aten::_weight_int4pack_mm_for_cpu`, which accumulates in float32."""

    @classmethod
    def get_min_capability(cls) -> int:
        """The GPU generation needed: none."""
        return -1

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        """Whether a layer can be served; if not, why, for vLLM to show while it loads the model."""
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
        """Repack a loaded layer in place; the scales' parameter then holds scales and offsets, see `pack`."""
        weight, scale, zero = self._get_weight_params(layer)
        zero_points = self._integers(zero) if self.config.zero_points else None
        scales = scale.data if scale.output_dim == 0 else scale.data.t()
        packed, scales_and_offsets = pack(self._integers(weight), scales, zero_points, self.config.act_type)
        replace_parameter(layer, self.w_q_name, torch.nn.Parameter(packed, requires_grad=False))
        replace_parameter(layer, self.w_s_name, torch.nn.Parameter(scales_and_offsets, requires_grad=False))
        if zero is not None:
            setattr(layer, self.w_zp_name, None)

    def _integers(self, parameter: Any) -> torch.Tensor:
        """A packed int32 parameter of either layout -> [outputs, inputs or groups], integers 0..15."""
        unpacked = unpack_quantized_values_into_int32(
            parameter.data, self.config.weight_type, parameter.packed_dim
        )
        return unpacked if parameter.output_dim == 0 else unpacked.t()

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[..., inputs] -> [..., outputs], in the activations' dtype."""
        packed, scales_and_offsets, _ = self._get_weight_params(layer)
        group = x.shape[-1] // scales_and_offsets.shape[0]
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        product = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, packed, group, scales_and_offsets)
        product = product.reshape(*x.shape[:-1], product.shape[-1])
        return product if bias is None else product + bias


def is_needed() -> bool:
    """Whether the library that vLLM loads for this CPU lacks the kernel."""
    from vllm import _custom_ops  # noqa: F401 - loads the library

    return not hasattr(torch.ops._C, "cpu_gemm_wna16")


def install() -> bool:
    """Put the kernel in the place of vLLM's CPU kernel; False if it is there already."""
    from vllm.model_executor.kernels import linear as upstream

    kernels = mixed_precision_kernels(_FIX, _PRODUCTS)
    if TorchInt4LinearKernel in kernels:
        return False
    stock = getattr(upstream, "CPUWNA16LinearKernel", None)
    expect(
        _FIX, stock in kernels, "the mixed-precision kernels of the CPU do not include CPUWNA16LinearKernel"
    )
    kernels[kernels.index(stock)] = TorchInt4LinearKernel
    return True
