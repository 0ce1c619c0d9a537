"""Quantised layers against the original ones and RTN, on the embedded model."""

import json
import shutil

import pytest
import torch
import transformers
from tinyworld.model import TinyShape, build, save_drafting_model

from slimqwen import progress, variant
from slimqwen.models.layer_error import LayerErrorError, measure_layer_errors
from slimqwen.recipe.calibration_text import CalibrationText
from slimqwen.recipe.stages import calibrate
from tests.checkpoints import edited_tensors
from tests.zoo.editable_checkpoint import multimodal, read_editable

ROOT = variant.repository_root()
TINY = ROOT / "weights" / "tiny"
LAYERS = [0, 1, 2, 3]
LIMIT = calibrate.CalibrateParameters.model_fields["layer_error_ratio"].default


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    """tiny with 4-bit MLPs, calibrated on little text."""
    folder = tmp_path_factory.mktemp("quantised")
    corpus = CalibrationText(path="tinyworld", sequences=8, length=64)
    parameters = calibrate.CalibrateParameters(group_size=32, corpus=corpus)
    calibrate.calibrate_weights(TINY, folder, parameters, progress.silent)
    return folder


@pytest.fixture(scope="module")
def texts():
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    lines = (ROOT / "eval/tasks/tinyworld/prose.jsonl").read_text().splitlines()[:6]
    return [tokenizer(json.loads(line)["text"])["input_ids"] for line in lines]


@pytest.fixture(scope="module")
def well_made(quantised, texts):
    return measure_layer_errors(quantised, TINY, texts)


def test_layers_that_were_made_well_are_about_as_far_off_as_rounded_ones(well_made):
    assert [row.layer for row in well_made] == LAYERS
    assert all(0.9 < row.ratio < 1.1 for row in well_made)
    assert all(0.01 < row.rounded_error < 0.2 for row in well_made)


def test_a_layer_with_wrong_scales_stands_out_alone(quantised, texts, well_made, tmp_path):
    rng = torch.Generator().manual_seed(0)
    for place in LAYERS:
        folder = shutil.copytree(quantised, tmp_path / str(place))
        with edited_tensors(folder) as tensors:
            for name, scale in tensors.items():
                if name.startswith(f"model.layers.{place}.") and name.endswith(".weight_scale"):
                    factors = torch.exp(0.3 * torch.randn(scale.shape, generator=rng))
                    tensors[name] = (scale.float() * factors).to(scale.dtype)
        rows = measure_layer_errors(folder, TINY, texts)
        assert [row.layer for row in rows if row.ratio > LIMIT] == [place]
        # Each layer is given the original's input: what is wrong before it does not reach it.
        others = [
            (row.ratio, before.ratio)
            for row, before in zip(rows, well_made, strict=True)
            if row.layer != place
        ]
        assert all(now == pytest.approx(before, rel=1e-3) for now, before in others)


def test_errors_are_what_the_definition_says(quantised):
    """The first layer by hand: its input is the embedding, so two models give all that is needed."""
    text = transformers.AutoTokenizer.from_pretrained(TINY)("The weaver of the town keeps a red boat.")[
        "input_ids"
    ]
    first = measure_layer_errors(quantised, TINY, [text])[0]
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


def test_a_multimodal_checkpoint_has_the_same_layers(quantised, tmp_path):
    text, folders = [[5, 600, 7000, 42, 3]], []
    for number, source in enumerate((quantised, TINY)):
        editable = read_editable(source)
        multimodal()(editable)
        folders.append(editable.write(tmp_path / str(number)))
    assert measure_layer_errors(*folders, text) == measure_layer_errors(quantised, TINY, text)


def test_a_layer_without_numbers_is_an_error(quantised, texts, tmp_path):
    folder = shutil.copytree(quantised, tmp_path / "copy")
    with edited_tensors(folder) as tensors:
        tensors["model.layers.2.mlp.up_proj.weight_scale"][3, 1] = float("nan")
    with pytest.raises(LayerErrorError, match="layer 2 has an error of nan"):
        measure_layer_errors(folder, TINY, texts)


def test_a_baseline_of_other_layers_is_told_in_one_line(quantised, tmp_path):
    shape = TinyShape(intermediate_size=256)
    save_drafting_model(build(shape, seed=0), tmp_path)
    with pytest.raises(LayerErrorError, match="name the checkpoint from which"):
        measure_layer_errors(quantised, tmp_path, [[5, 6, 7]])


def test_a_checkpoint_that_is_not_quantised_has_no_such_layers():
    assert measure_layer_errors(TINY, TINY, [[5, 6, 7]]) == []
