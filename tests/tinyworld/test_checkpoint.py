"""The committed checkpoint has the form of the real family."""

import json

from tinyworld.context import ContextPoint, usable_context
from tinyworld.tokenizer import chat_template, end_token_ids

from tests.checkpoints import TINY


def test_it_is_small_and_of_the_real_familys_form():
    config = json.loads((TINY / "config.json").read_text())
    assert (TINY / "model.safetensors").stat().st_size <= 20_000_000
    assert config["architectures"] == ["Qwen3_5ForCausalLM"]
    assert config["head_dim"] == 256
    assert config["linear_key_head_dim"] == config["linear_value_head_dim"] == 128
    assert config["layer_types"] == ["linear_attention"] * 3 + ["full_attention"]
    assert config["tie_word_embeddings"]
    assert config["vocab_size"] == 8192


def test_generation_stops_at_both_end_tokens():
    settings = json.loads((TINY / "generation_config.json").read_text())
    assert settings["eos_token_id"] == list(end_token_ids())


def test_the_context_limit_is_the_one_that_was_measured():
    config = json.loads((TINY / "config.json").read_text())
    record = json.loads((TINY / "training.json").read_text())
    points = [ContextPoint(**point) for point in record["context_sweep"]["points"]]
    assert config["max_position_embeddings"] == usable_context(points) >= 1_024


def test_the_template_is_the_tools_own():
    assert (TINY / "chat_template.jinja").read_text() == chat_template()
