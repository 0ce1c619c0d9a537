"""Plain rounding of weights in groups: what every search for better scales is measured against."""

import torch
from torch import Tensor


def rounded(weight: Tensor, group: int, bits: int, *, symmetric: bool = True) -> Tensor:
    """Rounded to nearest, as compressed-tensors' min-max observer has it.

    Args:
        weight: float32 [rows, columns].
        group: weights of a row that share a scale of bfloat16; divides the columns.
        bits: of a weight.
        symmetric: around zero; else every group has a zero point.

    Returns:
        float32 [rows, columns].
    """
    groups = weight.reshape(-1, group)
    levels = 2**bits
    tiny = torch.finfo(torch.float32).tiny
    if symmetric:
        scale = groups.abs().amax(dim=1, keepdim=True) / ((levels - 1) / 2)
        scale = scale.bfloat16().float().clamp_min(tiny)
        steps = (groups / scale).round().clamp(-levels // 2, levels // 2 - 1)
    else:
        low, high = groups.amin(1, keepdim=True).clamp_max(0), groups.amax(1, keepdim=True).clamp_min(0)
        scale = ((high - low) / (levels - 1)).bfloat16().float().clamp_min(tiny)
        zero = (-low / scale).round().clamp(0, levels - 1)
        steps = ((groups / scale).round() + zero).clamp(0, levels - 1) - zero
    return (steps * scale).reshape(weight.shape)
