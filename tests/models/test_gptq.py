"""GPTQ on rows of one weight: it spends its rounding where the inputs are, with the scales of round-to-nearest."""

import pytest
import torch

from slimqwen.checkpoint.rtn import quantise
from slimqwen.models.gptq import GptqError, GptqRounding

GROUP = 32


@pytest.fixture
def inputs() -> torch.Tensor:
    """Correlated inputs as hidden states are, [inputs, 64]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(512, 16, generator=generator) @ torch.randn(
        16, 64, generator=generator
    ) + 0.1 * torch.randn(512, 64, generator=generator)


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(24, 64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("bits", [4, 8])
def test_the_products_with_the_inputs_are_nearer_than_those_of_rounded_weights(inputs, weight, bits):
    integers, scales = quantise(weight, GROUP, bits)
    rounding = GptqRounding(inputs.T @ inputs, GROUP, bits)
    found = torch.cat(
        [rounding(block, part) for block, part in zip(weight.split(10), scales.split(10), strict=True)]
    )
    assert found.dtype == torch.int8
    levels = 2 ** (bits - 1)
    assert (int(found.min()) >= -levels) & (int(found.max()) <= levels - 1)
    spread = scales.float().repeat_interleave(GROUP, 1)
    exact = inputs @ weight.T
    errors = [float((inputs @ (each * spread).T - exact).norm() / exact.norm()) for each in (found, integers)]
    assert rounding.errors == pytest.approx(errors, rel=1e-3)
    assert errors[0] < 0.6 * errors[1]


def test_a_group_of_zeros_stays_zero(inputs, weight):
    weight[3, :GROUP] = 0
    _, scales = quantise(weight, GROUP, 4)
    found = GptqRounding(inputs.T @ inputs, GROUP, 4)(weight, scales)
    assert scales[3, 0] == 0
    assert torch.isfinite(found.float()).all()
    assert found[4].abs().max() > 0


def test_inputs_that_are_not_finite_are_refused_in_one_line(inputs, weight):
    inputs[5, 5] = float("nan")
    with pytest.raises(GptqError, match="too few different inputs for GPTQ; use more text"):
        GptqRounding(inputs.T @ inputs, GROUP, 4)(weight, quantise(weight, GROUP, 4)[1])
