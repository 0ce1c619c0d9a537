"""Round-to-nearest: as many levels as the bits give, and the same numbers from both functions."""

import pytest
import torch

from slimqwen.checkpoint.rtn import quantise, round_to_nearest
from slimqwen.formats.compressed_tensors import PackedIntegers


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_weights_are_rounded_to_the_nearest_of_as_many_levels_as_the_bits_give(symmetric, bits):
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)) + 0.3
    off = (round_to_nearest(weight, PackedIntegers(bits, 32, symmetric)) - weight).reshape(-1, 32)
    groups = weight.reshape(-1, 32)
    reach = (
        2 * groups.abs().amax(1) if symmetric else groups.amax(1).clamp_min(0) - groups.amin(1).clamp_max(0)
    )
    step = reach / (2**bits - 1)
    assert (off.abs().amax(1) <= step * 0.51 + reach * 2**-8).all()
    assert off.abs().amax(1).mean() > 0.3 * step.mean()
    levels = (off + groups)[0].unique()
    assert len(levels) <= 2**bits


def test_scales_are_the_nearest_bfloat16_of_the_largest_weight_and_zeros_stay_zero():
    weight = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    weight[0, :32] = 0
    integers, scales = quantise(weight, 32, 4)
    assert torch.equal(scales, (weight.reshape(5, 2, 32).abs().amax(2) / 7.5).bfloat16())
    assert not integers[0, :32].any()


@pytest.mark.parametrize("group_size", [32, 64])
def test_what_is_stored_is_what_compressed_tensors_rounds_to(group_size):
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(1))
    weight[3] = 0
    integers, scales = quantise(weight, group_size, 4)
    stored = integers * scales.float().repeat_interleave(group_size, dim=1)
    torch.testing.assert_close(round_to_nearest(weight, PackedIntegers(4, group_size)), stored)
