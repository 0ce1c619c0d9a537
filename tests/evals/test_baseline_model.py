import shutil
import weakref

import pytest
import torch
import transformers

from slimqwen.evals.baseline_model import BaselineModel
from slimqwen.models.language_model import load_language_model
from tests.checkpoints import TINY, edited_tensors
from tests.zoo.published_forms import PUBLISHED_FORMS

IDS = list(range(300, 372))


@pytest.fixture
def model(tmp_path):
    return BaselineModel(TINY, tmp_path / "states")


def without_layers(weights, cache, monkeypatch):
    """A baseline that cannot read a text, only answer from kept states."""
    model = BaselineModel(weights, cache)
    monkeypatch.setattr(model, "_hidden_states", None)
    return model


def test_log_probabilities_are_those_of_the_whole_model(model):
    whole = transformers.Qwen3_5ForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = whole(torch.tensor([IDS[:-1]]), use_cache=False).logits[0]
    read = model.log_probabilities(IDS)
    assert read.shape == (len(IDS) - 1, 8192)
    assert torch.equal(read, logits.log_softmax(-1))


def test_a_text_is_read_once_for_all_comparisons(model, tmp_path, monkeypatch):
    first = model.log_probabilities(IDS)
    again = without_layers(TINY, tmp_path / "states", monkeypatch)
    assert torch.equal(again.log_probabilities(IDS), first)
    (kept,) = (tmp_path / "states").iterdir()
    assert kept.stat().st_size < first.nbytes / 10
    with pytest.raises(TypeError):
        again.log_probabilities(IDS[:-1])


def test_a_baseline_without_its_layers_answers_as_before_and_loads_them_for_another_text(model, tmp_path):
    first = model.log_probabilities(IDS)
    layer = weakref.ref(model._model.model.layers[0])
    model.free_layers()
    assert layer() is None
    assert torch.equal(model.log_probabilities(IDS), first)
    whole = BaselineModel(TINY, tmp_path / "others").log_probabilities(IDS[:-1])
    assert torch.equal(model.log_probabilities(IDS[:-1]), whole)


def test_states_that_were_cut_are_computed_again(model, tmp_path):
    first = model.log_probabilities(IDS)
    (kept,) = (tmp_path / "states").iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(whole[: len(whole) // 2])
    assert torch.equal(model.log_probabilities(IDS), first)
    assert kept.read_bytes() == whole


def test_another_checkpoint_has_states_of_its_own(model, tmp_path):
    first = model.log_probabilities(IDS)
    other = shutil.copytree(TINY, tmp_path / "other")
    with edited_tensors(other) as tensors:
        tensors["model.layers.0.mlp.down_proj.weight"] *= 1.5
    assert not torch.equal(BaselineModel(other, tmp_path / "states").log_probabilities(IDS), first)


def test_a_quantised_baseline_has_the_weights_that_its_integers_mean(tmp_path):
    rounded = PUBLISHED_FORMS["w4a16"].build(tmp_path / "rounded")
    read = BaselineModel(rounded, tmp_path / "states").log_probabilities(IDS)
    with torch.inference_mode():
        logits = load_language_model(rounded)(torch.tensor([IDS[:-1]]), use_cache=False).logits[0]
    assert torch.equal(read, logits.log_softmax(-1))
    exact = BaselineModel(TINY, tmp_path / "states").log_probabilities(IDS)
    assert 0 < (exact.exp() * (exact - read)).sum(-1).mean() < 0.1
