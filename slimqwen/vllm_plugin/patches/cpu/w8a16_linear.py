"""Compute W8A16 linears on a CPU with torch's own products.

vLLM 0.32 has no kernel for them: none of its mixed-precision kernels for the CPU
(`vllm/model_executor/kernels/linear/__init__.py`) supports uint8b128, and loading such a checkpoint ends in "Failed to
find a kernel". The kernel of this fix is added at the end of the list, for weights with one scale per row.

Remove this fix when vLLM has a W8A16 kernel for CPUs.
"""

import torch
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import (
    MPLinearKernel,
    MPLinearLayerConfig,
)
from vllm.model_executor.layers.quantization.utils import replace_parameter
from vllm.model_executor.layers.quantization.utils.quant_utils import unpack_quantized_values_into_int32
from vllm.scalar_type import scalar_types

from slimqwen.vllm_plugin.patches.upstream import mixed_precision_kernels

_FIX = "w8a16_linear"
_MIDDLE = 128  # a stored weight is value + 128
_ACTIVATIONS = (torch.bfloat16, torch.float16, torch.float32)
_INPUT_BLOCK = (
    16  # in bfloat16 aten::_weight_int8pack_mm reads past the end of rows that are no multiple of it
)
_FEW_ROWS = 48  # up to this number the int8 product is fastest; at 2,048 rows bfloat16 is three times as fast


def _linear(rows: torch.Tensor, integers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Multiply: [rows, inputs], int8 [outputs, inputs], scales [outputs] -> [rows, outputs] in the dtype of `rows`."""
    # Without bfloat16 instructions the product of bfloat16 matrices takes four times as long as the int8 product.
    few = rows.shape[0] <= _FEW_ROWS
    if few or rows.dtype != torch.bfloat16 or not torch.cpu._is_avx512_bf16_supported():
        return torch.ops.aten._weight_int8pack_mm(rows, integers, scales)
    return torch.nn.functional.linear(rows, integers.to(rows.dtype) * scales.unsqueeze(1))


def _shape(rows: torch.Tensor, integers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], integers.shape[0])


# A registered operator: vLLM compiles one graph for all numbers of rows, so the choice must not be part of the graph.
_LIBRARY = torch.library.Library("slimqwen", "FRAGMENT")
_LIBRARY.define("int8_linear(Tensor rows, Tensor integers, Tensor scales) -> Tensor")
_LIBRARY.impl("int8_linear", _linear, "CPU")
_LIBRARY.impl("int8_linear", _shape, "Meta")


class TorchInt8LinearKernel(MPLinearKernel):  # type: ignore[misc] # vLLM is not followed
    """Symmetric W8A16 linears, one scale per row: `aten::_weight_int8pack_mm`, or a bfloat16 product for many rows."""

    @classmethod
    def get_min_capability(cls) -> int:
        """The least compute capability of a GPU: -1, as none is needed."""
        return -1

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        """Whether the kernel supports a layer; if not, the reason, which vLLM shows while it loads the model."""
        inputs, _ = c.partition_weight_shape
        if c.weight_type != scalar_types.uint8b128:
            return False, f"weights are {c.weight_type}, not uint8b128"
        if c.zero_points:
            return False, "weights have zero points"
        if c.act_type not in _ACTIVATIONS:
            return False, f"activations are {c.act_type}, not bfloat16, float16 or float32"
        if c.group_size not in (-1, inputs):
            return False, f"the group size is {c.group_size}, not one scale per row"
        if inputs % _INPUT_BLOCK:
            return False, f"{inputs} inputs are not a multiple of {_INPUT_BLOCK}"
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Unpack a loaded layer in place to int8 [outputs, inputs] and scales [outputs]."""
        weight, scale, _ = self._get_weight_params(layer)
        integers = unpack_quantized_values_into_int32(weight.data, self.config.weight_type, weight.packed_dim)
        if weight.output_dim != 0:
            integers = integers.t()
        integers = (integers - _MIDDLE).to(torch.int8).contiguous()
        scales = scale.data.reshape(-1).to(self.config.act_type).contiguous()
        replace_parameter(layer, self.w_q_name, torch.nn.Parameter(integers, requires_grad=False))
        replace_parameter(layer, self.w_s_name, torch.nn.Parameter(scales, requires_grad=False))

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiply: [..., inputs] -> [..., outputs], in the dtype of the activations."""
        integers, scales, _ = self._get_weight_params(layer)
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        product = torch.ops.slimqwen.int8_linear(rows, integers, scales)
        product = product.reshape(*x.shape[:-1], product.shape[-1])
        return product if bias is None else product + bias


def install() -> bool:
    """Add the kernel at the end of vLLM's kernels for the CPU; False if it is there already."""
    kernels = mixed_precision_kernels(_FIX, ("_weight_int8pack_mm",))
    if any(issubclass(kernel, TorchInt8LinearKernel) for kernel in kernels):
        return False
    kernels.append(TorchInt8LinearKernel)
    return True
