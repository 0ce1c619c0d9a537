"""The recipe of llm-compressor in a published folder: llm-compressor reads it, and it says what `calibrate` did."""

import pytest
from llmcompressor.recipe import Recipe

from slimqwen import checkpoint
from slimqwen.checkpoint.config import write_config
from slimqwen.evals.compressor_recipe import render_compressor_recipe
from slimqwen.formats.compressed_tensors import config_group

GROUPS = {"group_0": config_group("re:.*mlp.*", 4, 32), "mtp": config_group("re:.*mtp.*", 8, 32)}


@pytest.fixture
def packed(made):
    config = dict(checkpoint.read_config(made.weights))
    (made.weights / "config.json").unlink()
    form = {"quant_method": "compressed-tensors", "config_groups": GROUPS, "ignore": ["lm_head"]}
    write_config(made.weights, config | {"quantization_config": form})
    return made


def test_llm_compressor_reads_the_scaling_and_the_rounding_of_the_layers_alone(packed, tmp_path):
    file = tmp_path / "r.yaml"
    text = render_compressor_recipe(packed)
    assert text
    file.write_text(text)
    scaling, rounding = Recipe.create_instance(str(file)).modifiers
    assert type(scaling).__name__ == "AWQModifier"
    assert type(rounding).__name__ == "QuantizationModifier"
    assert list(rounding.config_groups) == ["group_0"]
    assert rounding.config_groups["group_0"].weights.num_bits == 4
    assert rounding.ignore == ["lm_head"]


def test_a_checkpoint_that_it_did_not_round_has_none(made):
    assert render_compressor_recipe(made) is None
