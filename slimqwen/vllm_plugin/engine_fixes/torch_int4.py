"""A W4A16 linear kernel for vLLM on torch's own int4 product: what `w4a16_linear` installs."""

from typing import Any

import torch
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import (
    MPLinearKernel,
    MPLinearLayerConfig,
)
from vllm.model_executor.layers.quantization.utils import replace_parameter
from vllm.model_executor.layers.quantization.utils.quant_utils import unpack_quantized_values_into_int32
from vllm.scalar_type import scalar_types

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
