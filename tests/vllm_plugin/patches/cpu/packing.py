"""How compressed-tensors and GPTQ store 4-bit integers."""

import torch


def packed(integers: torch.Tensor, dim: int) -> torch.Tensor:
    """Eight integers 0..15 to an int32 along a dimension, the first in the lowest bits."""
    eights = integers.movedim(dim, -1).unflatten(-1, (-1, 8)).to(torch.int64)
    words = (eights << torch.arange(0, 32, 4)).sum(-1)
    return words.to(torch.int32).movedim(-1, dim).contiguous()
