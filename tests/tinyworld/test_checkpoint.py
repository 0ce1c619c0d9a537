"""The committed checkpoint has the form of the real family."""

import json

import pytest
from tinyworld.context import ContextPoint, token_log_probabilities, usable_context
from tinyworld.tokenizer import end_token_ids


def test_it_is_small_and_of_the_real_familys_form(tiny_folder):
    config = json.loads((tiny_folder / "config.json").read_text())
    assert (tiny_folder / "model.safetensors").stat().st_size <= 20_000_000
    assert config["architectures"] == ["Qwen3_5ForCausalLM"]
    assert config["head_dim"] == 256
    assert config["linear_key_head_dim"] == config["linear_value_head_dim"] == 128
    assert config["layer_types"] == ["linear_attention"] * 3 + ["full_attention"]
    assert config["tie_word_embeddings"]
    assert config["vocab_size"] == 8192


def test_generation_stops_at_both_end_tokens(tiny_folder):
    settings = json.loads((tiny_folder / "generation_config.json").read_text())
    assert settings["eos_token_id"] == list(end_token_ids())


def test_the_context_limit_is_the_one_that_was_measured(tiny_folder):
    config = json.loads((tiny_folder / "config.json").read_text())
    record = json.loads((tiny_folder / "training.json").read_text())
    points = [ContextPoint(**point) for point in record["context_sweep"]["points"]]
    assert config["max_position_embeddings"] == usable_context(points) >= 1_024


def test_the_context_ends_before_the_first_length_that_is_worse():
    points = [ContextPoint(128, 1.0, 1.0), ContextPoint(256, 0.9, 1.0), ContextPoint(512, 1.1, 1.0)]
    assert usable_context(points) == 256
    assert usable_context([*points[:2], ContextPoint(512, 0.8, 1.0)]) == 512


def test_log_probabilities_do_not_depend_on_what_shares_the_batch(tiny_model, tokenizer):
    contexts = tokenizer(["At dawn", "The ship", "In the old song, it was said that"])["input_ids"]
    targets = tokenizer([" the flag", " of the town sells", " red"])["input_ids"]
    pairs = list(zip(contexts, targets, strict=True))
    together = token_log_probabilities(tiny_model, pairs)
    for pair, logs in zip(pairs, together, strict=True):
        (alone,) = token_log_probabilities(tiny_model, [pair])
        assert alone == pytest.approx(logs, abs=1e-4)
