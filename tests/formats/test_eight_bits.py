"""Numbers of eight bits times the scale of the weight, of each row or of each block."""

import pytest
import torch

from slimqwen.formats.eight_bits import EightBits
from tests.formats.stored import Stored

NUMBERS = (torch.arange(48).reshape(6, 8) - 20.0).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("block", "name", "scales", "spread"),
    [
        ((None, None), "weight_scale", torch.tensor([0.5]), lambda scales: scales),
        ((None, None), "weight_scale_inv", torch.tensor([[3.0]]), lambda scales: scales),
        ((1, None), "weight_scale", torch.arange(1.0, 7.0).reshape(6, 1), lambda scales: scales),
        (
            (4, 3),
            "weight_scale_inv",
            torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]),
            lambda scales: torch.tensor(
                [[scales[row // 4, column // 3] for column in range(8)] for row in range(6)]
            ),
        ),
    ],
    ids=["weight", "weight, inverse", "row", "block"],
)
def test_numbers_are_multiplied_by_the_scale_that_they_share(block, name, scales, spread):
    layout = EightBits(block=block, scale=name)
    parts = {"weight": Stored(NUMBERS), name: Stored(scales)}
    expected = NUMBERS.float() * spread(scales)
    assert layout.unreadable(parts) is None
    assert torch.equal(torch.cat(list(layout.blocks(parts, 4))), expected)
    assert torch.equal(layout.read(parts, 3, 5), expected[3:5])


def test_scales_that_are_not_those_of_the_blocks_are_not_read():
    parts = {"weight": Stored(NUMBERS), "weight_scale": Stored(torch.ones(3, 3))}
    assert EightBits(block=(4, 3)).unreadable(parts) == "scaled by [3, 3] numbers"


def test_a_weight_has_as_many_scales_as_blocks():
    assert EightBits().parts(6, 8)["weight_scale"][0] == (1,)
    assert EightBits(block=(4, 3)).parts(6, 8)["weight_scale"][0] == (2, 3)
    assert EightBits(precision="int8", block=(1, None)).parts(6, 8)["weight"] == ((6, 8), ("I8",))
