"""Values of config.json that stand at one of two places."""

from typing import Any

import pytest

from slimqwen.checkpoint import CorruptCheckpointError
from slimqwen.checkpoint.config import quantisation, quantised, text_config, untied


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"torch_dtype": "float16", "dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "bfloat16", "text_config": {}}, "bfloat16"),
        ({"text_config": {"torch_dtype": "float16"}}, "float16"),
        ({"dtype": "bfloat16", "text_config": {"dtype": "float32"}}, "bfloat16"),
        ({"dtype": None, "text_config": {"dtype": "float32"}}, "float32"),
        ({"text_config": {}}, None),
    ],
)
def test_the_dtype_is_found_where_it_stands(config: dict[str, Any], dtype: str | None) -> None:
    assert text_config(config).get("dtype") == dtype


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        ({"text_config": []}, r"text_config is \[\], not an object; make or download"),
        (
            {"hidden_size": "x", "num_attention_heads": 2},
            "hidden_size is 'x', not a whole number; make",
        ),
        ({"text_config": {"max_position_embeddings": 0.5}}, "max_position_embeddings is 0.5, not a whole"),
    ],
)
def test_a_value_of_another_type_is_one_line(config: dict[str, Any], fault: str) -> None:
    with pytest.raises(CorruptCheckpointError, match=fault):
        text_config(config)


def test_the_language_part_keeps_its_own_keys_and_the_config_is_not_changed() -> None:
    config = {
        "vocab_size": 1,
        "tie_word_embeddings": True,
        "text_config": {"vocab_size": 2, "eos_token_id": [2, 0]},
    }
    assert text_config(config) == {"vocab_size": 2, "eos_token_id": [2, 0], "tie_word_embeddings": True}
    assert config["text_config"] == {"vocab_size": 2, "eos_token_id": [2, 0]}


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": {"quant_method": "fp8"}},
        {"compression_config": {"quant_method": "fp8"}},
        {"text_config": {"quantization_config": {"quant_method": "fp8"}}},
        {"quantization_config": None, "text_config": {"quantization_config": {"quant_method": "fp8"}}},
    ],
)
def test_the_quantisation_is_found_where_it_stands(config: dict[str, Any]) -> None:
    assert quantisation(config) == {"quant_method": "fp8"}
    assert quantisation({"text_config": {}}) == {}


def test_a_quantisation_is_written_at_one_place_alone() -> None:
    old, new = {"quant_method": "fp8"}, {"quant_method": "compressed-tensors"}
    inner = {"vocab_size": 2, "quantization_config": old}
    config = {"model_type": "a", "compression_config": old, "text_config": inner}
    written = quantised(config, new)
    assert written == {"model_type": "a", "text_config": {"vocab_size": 2}, "quantization_config": new}
    assert quantised({"vocab_size": 2}, new) == {"vocab_size": 2, "quantization_config": new}
    assert config["text_config"] == inner


def test_an_untied_head_is_untied_at_both_places() -> None:
    assert untied({"tie_word_embeddings": True}) == {"tie_word_embeddings": False}
    flags = untied({"tie_word_embeddings": True, "text_config": {"vocab_size": 2}})
    assert flags == {
        "tie_word_embeddings": False,
        "text_config": {"vocab_size": 2, "tie_word_embeddings": False},
    }
