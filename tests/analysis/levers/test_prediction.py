"""Terms of a step, counted by hand on a model of a few hundred numbers."""

from pathlib import Path

import pytest

from slimqwen.analysis.levers import prediction
from slimqwen.analysis.roofline.gpu import RooflineError
from slimqwen.checkpoint import digest, verify
from tests.analysis.roofline.shapes import (
    BODY_BYTES,
    CONFIG,
    HEAD_BYTES,
    KV,
    MTP_BYTES,
    ROW,
    SMALL,
    STATE,
)

ROOT = Path(__file__).parents[3]
RATES = {"bf16_1": 1000.0, "bf16_5": 500.0}
"""Bytes a second."""


def parts(depth: int) -> dict[str, float]:
    return prediction.parts_ms(SMALL, RATES, 100.0, 7.0, depth, context_len=10)


def test_a_step_without_drafts_reads_layers_head_states_and_cache_once() -> None:
    terms = parts(0)
    assert terms["layers"] == pytest.approx(1e3 * BODY_BYTES / 1000)
    assert terms["output head"] == pytest.approx(1e3 * HEAD_BYTES / 1000)
    assert terms["draft layers"] == terms["draft head"] == 0
    assert terms["states and KV cache"] == pytest.approx(1e3 * (ROW + 11 * KV + 2 * STATE) / 100)
    assert terms["host"] == 7.0
    assert tuple(terms) == prediction.PARTS


def test_a_step_with_drafts_reads_at_the_rate_of_its_tokens_and_keeps_a_state_for_each() -> None:
    terms = parts(4)
    assert terms["layers"] == pytest.approx(1e3 * BODY_BYTES / 500)
    assert terms["draft layers"] == pytest.approx(4e3 * MTP_BYTES / 1000)
    assert terms["draft head"] == pytest.approx(4e3 * HEAD_BYTES / 1000)
    target = 5 * ROW + 15 * KV + (2 + 4) * STATE
    assert terms["states and KV cache"] == pytest.approx(1e3 * (target + 4 * (ROW + 11 * KV)) / 100)


def test_weights_that_this_cpu_has_no_product_for_are_refused() -> None:
    with pytest.raises(RooflineError, match="no product of BF16"):
        prediction.parts_ms(SMALL, {}, 100.0, 7.0, 0, context_len=10)


def test_the_narrow_checkpoint_has_the_layers_of_the_other_and_is_made_once(tmp_path: Path) -> None:
    layers = ["linear_attention", "linear_attention", "full_attention"]
    text = {
        **CONFIG,
        "layer_types": layers,
        "num_hidden_layers": 3,
        "head_dim": 256,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "mtp_num_hidden_layers": 1,
        "mtp_draft_vocab_size": 64,
        "model_type": "qwen3_5_text",
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.25},
        "dtype": "bfloat16",
    }
    folder = prediction.narrow_checkpoint(text, tmp_path / "narrow", ROOT / "weights" / "tiny")
    verify(folder, "no cure")
    assert (folder / "model.safetensors").stat().st_size < 8e6
    before = digest(folder)
    assert prediction.narrow_checkpoint(text, folder, ROOT / "weights" / "tiny") == folder
    assert digest(folder) == before
