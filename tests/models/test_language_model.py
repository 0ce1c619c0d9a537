"""The language model of every published form of checkpoint in transformers, and its single layers and embedding."""

from pathlib import Path
from typing import Any

import pytest
import torch

from slimqwen.checkpoint import CorruptCheckpointError
from slimqwen.checkpoint.config import read_config, write_config
from slimqwen.formats.format import UnsupportedFormatError
from slimqwen.models.language_model import (
    build_empty_model,
    load_language_model,
    load_layer,
    read_embeddings,
    run_layer,
)
from tests.checkpoints import TINY, edited_tensors
from tests.zoo.editable_checkpoint import tiny
from tests.zoo.published_forms import PUBLISHED_FORMS, SAME_TENSORS

OTHER_HEADS = ("multimodal-w4a16-mtp", "w4a16-mtp", "fp8-blocks-mtp16", "mtp-lost")
"""Published forms that differ from others in the MTP head, which is not read here."""
OF_TINY = [
    name
    for name, published in PUBLISHED_FORMS.items()
    if published.start is tiny
    and name not in ("more-rows", "more-ids", "float16")  # other shapes, other last bits
    and name not in SAME_TENSORS.keys() - {"dtype-absent", "adapter-beside"}
    and name not in OTHER_HEADS
]


@pytest.fixture(scope="module")
def state_of_tiny() -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = load_language_model(TINY).state_dict()
    return state


@pytest.mark.parametrize("name", OF_TINY)
def test_every_form_of_the_small_model_is_the_same_model(
    name: str, state_of_tiny: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    folder = PUBLISHED_FORMS[name].build(tmp_path / name)
    model = load_language_model(folder)
    assert type(model).__name__ == "Qwen3_5ForCausalLM"
    state = model.state_dict()
    assert state.keys() == state_of_tiny.keys()
    rounded = {weight for weight, tensor in state.items() if not torch.equal(tensor, state_of_tiny[weight])}
    assert bool(rounded) == ("quantization_config" in read_config(folder))
    for weight in rounded:
        # Four bits leave a tenth of a weight as error; misread integers or scales leave nothing of it.
        assert (state[weight] - state_of_tiny[weight]).norm() < 0.2 * state_of_tiny[weight].norm()


@pytest.mark.parametrize(
    ("name", "kind"),
    [("llama", "Llama"), ("qwen2", "Qwen2"), ("qwen3", "Qwen3"), ("qwen3.5-moe", "Qwen3_5Moe")],
)
def test_other_families_load_into_their_own_class(name: str, kind: str, tmp_path: Path) -> None:
    model = load_language_model(PUBLISHED_FORMS[name].build(tmp_path / name), torch.bfloat16)
    assert type(model).__name__ == f"{kind}ForCausalLM"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_an_empty_model_has_the_class_and_the_parameters_of_the_checkpoint_and_no_numbers(
    state_of_tiny: dict[str, torch.Tensor],
) -> None:
    model = build_empty_model(TINY)
    assert type(model).__name__ == "Qwen3_5ForCausalLM"
    shapes = {name: parameter.shape for name, parameter in model.state_dict().items()}
    assert shapes == {name: tensor.shape for name, tensor in state_of_tiny.items()}
    assert all(parameter.is_meta for parameter in model.parameters())


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
        (widen, r"the tensors of .* do not fit its config\.json"),
        (
            quantise_unreadably,
            r"layers\.0\.mlp\.up_proj\.weight is stored as U8 .*; use a checkpoint",
        ),
    ],
)
def test_tensors_that_are_not_the_model_s_are_refused(damage: Any, message: str, tmp_path: Path) -> None:
    folder = PUBLISHED_FORMS["text"].build(tmp_path / "text")
    with edited_tensors(folder) as tensors:
        damage(tensors)
    with pytest.raises((CorruptCheckpointError, UnsupportedFormatError), match=message):
        load_language_model(folder)


@pytest.mark.parametrize("model_type", ["qwen9", "clip_vision_model"])
def test_a_config_of_no_language_model_is_refused(model_type: str, tmp_path: Path) -> None:
    folder = PUBLISHED_FORMS["text"].build(tmp_path / "text")
    write_config(folder, {**read_config(folder), "model_type": model_type})
    with pytest.raises(
        CorruptCheckpointError, match=r"transformers has no language model for .*config\.json"
    ):
        load_language_model(folder)


def test_a_layer_keeps_its_name_and_gives_states_before_the_final_norm() -> None:
    ids = torch.tensor([[8191, 0, 3, 3, 77, 1000, 4096]])
    embeddings = read_embeddings(TINY, ids)
    model = load_language_model(TINY)
    assert torch.equal(embeddings, model.model.embed_tokens(ids))
    layer = load_layer(TINY, 3)
    names = {name for name, _ in model.named_parameters() if name.startswith("model.layers.3.")}
    assert {name for name, _ in layer.named_parameters() if "layers" in name} == names
    states, given = run_layer(layer, embeddings), []
    model.model.layers[3].register_forward_pre_hook(lambda *_: (embeddings,))
    model.model.norm.register_forward_pre_hook(lambda _, arguments: given.append(arguments[0]))
    with torch.no_grad():
        model.model(ids)
    assert torch.equal(states, given[0])


def test_an_embedding_that_is_not_finite_or_missing_is_an_error(tmp_path: Path) -> None:
    folder = PUBLISHED_FORMS["text"].build(tmp_path / "text")
    with edited_tensors(folder) as tensors:
        tensors["model.embed_tokens.weight"][8000, 3] = torch.inf
    with pytest.raises(CorruptCheckpointError, match=r"embed_tokens\.weight has NaN or infinity"):
        read_embeddings(folder, torch.tensor([1]))
    with edited_tensors(folder) as tensors:
        del tensors["model.embed_tokens.weight"]
    with pytest.raises(CorruptCheckpointError, match=r"lacks the tensor model\.embed_tokens\.weight"):
        read_embeddings(folder, torch.tensor([1]))
