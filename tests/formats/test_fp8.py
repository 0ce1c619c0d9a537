"""Which scales a weight in FP8 has by its config.json."""

import pytest

from slimqwen.formats import find_format
from slimqwen.formats.eight_bits import EightBits


@pytest.mark.parametrize(
    ("settings", "layout"),
    [
        ({}, EightBits()),
        ({"weight_block_size": [4, 3]}, EightBits(block=(4, 3), scale="weight_scale_inv")),
    ],
    ids=["one", "one a block"],
)
def test_a_weight_has_the_scales_that_its_config_says(settings, layout):
    assert find_format({"quant_method": "fp8", **settings}).layouts_of("model.layers.0.mlp.up_proj") == [
        layout
    ]
