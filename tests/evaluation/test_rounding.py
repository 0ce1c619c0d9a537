"""Rounding against what its bits allow; test_lm_head holds it against compressed-tensors."""

import pytest
import torch

from slimqwen.evaluation.rounding import rounded


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_plain_rounding_is_to_the_nearest_of_as_many_levels_as_the_bits_give(symmetric, bits):
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)) + 0.3
    off = (rounded(weight, 32, bits, symmetric=symmetric) - weight).reshape(-1, 32)
    groups = weight.reshape(-1, 32)
    reach = (
        2 * groups.abs().amax(1) if symmetric else groups.amax(1).clamp_min(0) - groups.amin(1).clamp_max(0)
    )
    step = reach / (2**bits - 1)
    assert (off.abs().amax(1) <= step * 0.51 + reach * 2**-8).all()
    assert off.abs().amax(1).mean() > 0.3 * step.mean()
    levels = (off + groups)[0].unique()
    assert len(levels) <= 2**bits
