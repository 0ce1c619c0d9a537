"""The context is the one that vLLM resolves: from plain positions without asking it, else by its own ModelConfig."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from slimqwen import variant
from slimqwen.serving import context_length
from slimqwen.serving.context_length import resolve_context
from slimqwen.serving.errors import ServingError

OVERRIDES = {"hf-overrides": {"max_position_embeddings": 8192}}
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.fixture
def weights(tmp_path):
    """Makes a config.json like tiny's, of 4,096 positions, with other rotary parameters."""

    def make(rope=None, *, nested=False) -> Path:
        folder = tmp_path / "weights"
        shutil.copytree(variant.load("tiny").weights, folder)
        config = json.loads((folder / "config.json").read_text())
        config["rope_parameters"] |= rope or {}
        if nested:
            config["rope_parameters"] = {"full_attention": config["rope_parameters"]}
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


@pytest.mark.parametrize(
    ("flags", "context"), [({}, 4096), ({"max-model-len": -1}, 4096), ({"max-model-len": 256}, 256)]
)
def test_plain_positions_need_no_vllm(weights, monkeypatch, flags, context):
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", None)  # an import fails
    assert resolve_context(weights(), flags, {}) == context
    with pytest.raises(
        ServingError, match=r"VLLM_MAX_MODEL_LEN=4097, but .* 4096 positions; set at most 4096"
    ):
        resolve_context(variant.load("tiny").weights, {"max-model-len": 4097}, {})


@pytest.mark.parametrize(
    ("rope", "flags", "variables", "context"),
    [
        ({}, OVERRIDES, {}, 8192),
        ({}, OVERRIDES | {"max-model-len": 8000}, {}, 8000),
        (LINEAR, {}, {}, 4 * 4096),
        (LINEAR, {"max-model-len": 9000}, {}, 9000),
        (YARN, {}, {}, 4096),
        ({}, {"max-model-len": 9000}, {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}, 9000),
    ],
)
def test_what_scales_positions_is_resolved_by_vllm_itself(weights, rope, flags, variables, context):
    assert resolve_context(weights(rope), flags, variables) == context


def test_vllms_refusal_is_one_line(weights):
    with pytest.raises(
        ServingError, match=r"greater than .*max_position_embeddings=8192.*; lower VLLM_MAX_MODEL_LEN"
    ):
        resolve_context(weights(), OVERRIDES | {"max-model-len": 9000}, {})


def test_positions_of_each_kind_of_layer_are_not_read_here(weights, monkeypatch):
    monkeypatch.setattr(context_length, "_ask_vllm", lambda *_: 123)
    assert resolve_context(weights(nested=True), {}, {}) == 123
