"""Dimensions of checkpoints: the tensors and the config that they make."""

import math

import pytest

from slimqwen import variant
from slimqwen.models.shape import Packing, Shape
from slimqwen.plan import shapes
from slimqwen.recipe.registry import STAGES

ROOT = variant.repository_root()


def test_a_published_model_has_the_parameters_of_its_name():
    stored = shapes.published_shape(ROOT, "qwen3.5-4b").tensors
    count = sum(math.prod(shape) for _, shape in stored.values())
    assert (
        4.2e9 < count < 4.4e9
    )  # the language model of Qwen3.5-4B and its MTP head, without the vision tower


def test_a_packed_linear_keeps_eight_weights_in_a_word_and_a_scale_a_group():
    stored = shapes.published_shape(ROOT, "cyankiwi").tensors
    name = "model.language_model.layers.0.mlp.down_proj"
    assert stored[f"{name}.weight_packed"] == ("I32", (2560, 9216 // 8))
    assert stored[f"{name}.weight_scale"] == ("BF16", (2560, 9216 // 32))


@pytest.fixture
def shape() -> Shape:
    published = shapes.published_shape(ROOT, "qwen3.5-0.8b")
    assert published is not None
    return published


def test_a_packed_output_head_is_untied_from_the_embedding(shape: Shape) -> None:
    assert shape.config_json["tie_word_embeddings"]
    packed = shape.with_packing({"lm_head": Packing(bits=4, group_size=32)})
    assert not packed.config_json["tie_word_embeddings"]
    assert "lm_head.weight_packed" in packed.tensors
    assert "model.language_model.embed_tokens.weight" in packed.tensors
    assert "lm_head" not in packed.config_json["quantization_config"]["ignore"]


@pytest.mark.parametrize(
    ("stage", "name"),
    [
        ("prune_vocab", "model.language_model.embed_tokens.weight"),
        ("trim_draft_vocab", "mtp.draft_head.weight"),
    ],
)
def test_sizes_are_rounded_up_to_what_the_stage_writes(shape: Shape, stage: str, name: str) -> None:
    corpus = {"corpus": {"path": "tinyworld"}} if stage == "prune_vocab" else {}
    parameters = STAGES[stage].parameters.model_validate({"size": 1000, **corpus})
    assert STAGES[stage].reshape(shape, parameters).tensors[name][1][0] == 1024
