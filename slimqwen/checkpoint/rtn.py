"""Round-to-nearest (RTN) quantisation of weights in groups: the baseline of methods that search for better scales."""

import torch
from torch import Tensor

from slimqwen.formats.compressed_tensors import PackedIntegers


def round_to_nearest(weight: Tensor, form: PackedIntegers) -> Tensor:
    """Quantise and dequantise weights as compressed-tensors' min-max observer does, with bfloat16 scales.

    Args:
        weight: float32 [rows, columns].
        form: bits and groups; a group size must divide `columns`.

    Returns:
        float32 [rows, columns].
    """
    # Slow to import.
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    group_size = form.group_size or weight.shape[1]
    args = QuantizationArgs(
        num_bits=form.bits, symmetric=form.symmetric, strategy="group", group_size=group_size
    )
    groups = weight.reshape(len(weight), -1, group_size)
    scales, zero_points = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    rounded: Tensor = fake_quantize(weight, scales.bfloat16().float(), zero_points, args)
    return rounded


def quantise(weight: Tensor, group_size: int, bits: int) -> tuple[Tensor, Tensor]:
    """Quantise weights symmetrically to the nearest integer.

    Args:
        weight: float32 [rows, columns].
        group_size: number of neighbouring weights of a row that share a scale; divides `columns`.
        bits: bits of an integer with its sign, at most 8.

    Returns:
        int8 [rows, columns] from -2^(bits-1) to 2^(bits-1) - 1; and scales, bfloat16 [rows, columns / group_size].
    """
    groups = weight.reshape(len(weight), -1, group_size)
    levels = 2**bits
    # The scale is rounded to bfloat16 first, so that the integers fit the scale that is stored.
    scales = (groups.abs().amax(dim=2) / ((levels - 1) / 2)).bfloat16()
    divisors = scales.float().unsqueeze(2)
    integers = torch.where(divisors > 0, groups / divisors, 0).round().clamp(-levels // 2, levels // 2 - 1)
    return integers.to(torch.int8).reshape(weight.shape), scales
