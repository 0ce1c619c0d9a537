"""Quantised layers against the baseline's and plain rounding, on the embedded model."""

import pytest
import torch
import transformers

from slimqwen import progress, variant
from slimqwen.evaluation import fidelity, layer_error
from slimqwen.evaluation.damage import Damage, damage
from slimqwen.evaluation.verdict import Verdict
from slimqwen.recipe import calibrate

ROOT = variant.repository_root()
TINY = ROOT / "weights" / "tiny"
LAYERS = [0, 1, 2, 3]


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    """tiny with 4-bit MLPs, calibrated on little text."""
    folder = tmp_path_factory.mktemp("quantised")
    corpus = calibrate.Corpus(sequences=8, length=64)
    parameters = calibrate.CalibrateParameters(group_size=32, corpus=corpus)
    calibrate.run(TINY, folder, parameters, progress.silent)
    return folder


@pytest.fixture(scope="module")
def plan():
    return fidelity.load_plan("tinyworld", ROOT)


@pytest.fixture(scope="module")
def well_made(quantised, plan):
    return fidelity.compare_layers(quantised, TINY, plan, ROOT)


def test_layers_that_were_made_well_are_about_as_far_off_as_rounded_ones(well_made):
    assert [row["layer"] for row in well_made["rows"]] == LAYERS
    assert all(0.9 < row["ratio"] < 1.1 for row in well_made["rows"])
    assert all(0.01 < row["rounded_error"] < 0.2 for row in well_made["rows"])
    assert well_made["verdict"] == Verdict.PASS


def test_a_layer_with_wrong_scales_fails_and_is_the_one_that_is_named(quantised, plan, well_made, tmp_path):
    seen = set()
    for seed in range(6):
        folder = tmp_path / str(seed)
        folder.mkdir()
        place = int(damage(quantised, folder, Damage.SCALES, seed).rsplit(".", 1)[1])
        found = fidelity.compare_layers(folder, TINY, plan, ROOT)
        assert found["verdict"] == Verdict.FAIL
        assert [row["layer"] for row in found["rows"] if row["ratio"] > found["limit"]] == [place]
        # Each layer is given the baseline's input: what is wrong before it does not reach it.
        others = [
            (row["ratio"], before["ratio"])
            for row, before in zip(found["rows"], well_made["rows"], strict=True)
            if row["layer"] != place
        ]
        assert all(now == pytest.approx(before, rel=1e-3) for now, before in others)
        seen.add(place)
    assert len(seen) > 1


def test_errors_are_what_the_definition_says(quantised):
    """The first layer by hand: its input is the embedding, so two models give all that is needed."""
    text = transformers.AutoTokenizer.from_pretrained(TINY)("The weaver of the town keeps a red boat.")[
        "input_ids"
    ]
    first = layer_error.measure(quantised, TINY, [text])[0]
    given, made, ours = None, None, None
    for folder in (TINY, quantised):
        packed = (
            {}
            if folder == TINY
            else {"quantization_config": transformers.CompressedTensorsConfig(run_compressed=False)}
        )
        model = transformers.Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32, **packed)
        states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
        if folder == TINY:
            given, made = states[0], states[1]
        else:
            ours = states[1]
    expected = ((ours - made).square().mean() / (made - given).square().mean()).sqrt().item()
    assert first.error == pytest.approx(expected, rel=1e-4)


def test_a_checkpoint_that_is_not_quantised_has_no_such_layers(plan):
    assert layer_error.measure(TINY, TINY, [[5, 6, 7]]) == []
    assert fidelity.compare_layers(TINY, TINY, plan, ROOT) is None
