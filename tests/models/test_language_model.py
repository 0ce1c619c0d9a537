"""The language model of every published form of checkpoint, in transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from slimqwen.checkpoint import CorruptCheckpointError
from slimqwen.checkpoint.config import read_config, write_config
from slimqwen.checkpoint.errors import UnsupportedFormatError
from slimqwen.models.language_model import load_language_model
from tests.checkpoints import TINY, edited_tensors
from tests.zoo.animals import ANIMALS
from tests.zoo.specimen import tiny

OF_TINY = [
    name
    for name, animal in ANIMALS.items()
    if animal.start is tiny
    and name not in ("more-rows", "more-ids", "float16")  # other shapes, other last bits
]


@pytest.fixture(scope="module")
def state_of_tiny() -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = load_language_model(TINY).state_dict()
    return state


@pytest.mark.parametrize("name", OF_TINY)
def test_every_form_of_the_small_model_is_the_same_model(
    name: str, state_of_tiny: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    folder = ANIMALS[name].build(tmp_path / name)
    model = load_language_model(folder)
    assert type(model).__name__ == "Qwen3_5ForCausalLM"
    state = model.state_dict()
    assert state.keys() == state_of_tiny.keys()
    rounded = {weight for weight, tensor in state.items() if not torch.equal(tensor, state_of_tiny[weight])}
    assert bool(rounded) == ("quantization_config" in read_config(folder))
    for weight in rounded:
        # Four bits leave a tenth of a weight as error; misread integers or scales leave nothing of it.
        assert (state[weight] - state_of_tiny[weight]).norm() < 0.2 * state_of_tiny[weight].norm()


@pytest.mark.parametrize(("name", "kind"), [("qwen3", "Qwen3"), ("qwen3.5-moe", "Qwen3_5Moe")])
def test_other_families_load_into_their_own_class(name: str, kind: str, tmp_path: Path) -> None:
    model = load_language_model(ANIMALS[name].build(tmp_path / name), torch.bfloat16)
    assert type(model).__name__ == f"{kind}ForCausalLM"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def lose(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.norm.weight"]


def widen(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.zeros(7)


def quantise_unreadably(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(512, 96, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose, r"lacks the tensor model\.norm\.weight"),
        (widen, r"its tensors do not fit its config\.json"),
        (
            quantise_unreadably,
            r"layers\.0\.mlp\.up_proj\.weight is packed in bytes, .*; take a checkpoint",
        ),
    ],
)
def test_tensors_that_are_not_the_model_s_are_refused(damage: Any, message: str, tmp_path: Path) -> None:
    folder = ANIMALS["text"].build(tmp_path / "text")
    with edited_tensors(folder) as tensors:
        damage(tensors)
    with pytest.raises((CorruptCheckpointError, UnsupportedFormatError), match=message):
        load_language_model(folder)


@pytest.mark.parametrize("model_type", ["qwen9", "clip_vision_model"])
def test_a_config_of_no_language_model_is_refused(model_type: str, tmp_path: Path) -> None:
    folder = ANIMALS["text"].build(tmp_path / "text")
    write_config(folder, {**read_config(folder), "model_type": model_type})
    with pytest.raises(CorruptCheckpointError, match=r"config\.json: transformers has no language model"):
        load_language_model(folder)
