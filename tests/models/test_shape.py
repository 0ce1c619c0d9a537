"""Dimensions of checkpoints: the tensors and the config that they make."""

import math
from pathlib import Path

import pytest

from slimqwen import variant
from slimqwen.formats import find_format
from slimqwen.models.outline import Outline
from slimqwen.models.shape import Packing, Shape
from slimqwen.plan import shapes
from slimqwen.recipe.registry import STAGES

ROOT = variant.repository_root()


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("smollm2-135m", 0.1345),
        ("llama-3.1-8b", 8.030),
        ("qwen2.5-7b", 7.616),
        ("qwen3-0.6b", 0.596),
        ("qwen3-4b", 4.022),
        ("qwen3-8b", 8.191),
        ("qwen3.5-0.8b", 0.752),
        ("qwen3.5-2b", 1.882),
        ("qwen3.5-4b", 4.206),
        ("qwen3.5-9b", 8.954),
        ("qwen3.5-27b", 26.896),
        ("qwen3.5-35b-a3b", 34.661),
    ],
)
def test_a_committed_shape_has_the_parameters_of_its_name(name: str, billions: float):
    """Language models alone; those of other families, and 8.95 of the 9B, are what their pages say."""
    stored = shapes.published_shape(ROOT, name).tensors
    count = sum(math.prod(shape) for tensor, (_, shape) in stored.items() if not tensor.startswith("mtp."))
    assert count / 1e9 == pytest.approx(billions, abs=0.001)


def test_packed_experts_are_stored_one_by_one_and_others_as_one_tensor_a_layer():
    mixture = shapes.published_shape(ROOT, "qwen3.5-35b-a3b")
    name = "model.language_model.layers.0.mlp.experts"
    assert mixture.tensors[f"{name}.gate_up_proj"] == ("BF16", (256, 1024, 2048))
    assert mixture.tensors["mtp.layers.0.mlp.experts.down_proj"] == ("BF16", (256, 2048, 512))
    packed = mixture.with_packing({"experts": Packing(bits=4, group_size=32)}).tensors
    assert packed[f"{name}.255.up_proj.weight_packed"] == ("I32", (512, 256))
    assert packed[f"{name}.0.down_proj.weight_scale"] == ("BF16", (2048, 16))
    assert packed["mtp.layers.0.mlp.experts.3.down_proj.weight"] == ("BF16", (2048, 512))
    assert not any("experts" in tensor and tensor.endswith("gate_up_proj") for tensor in packed)


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


@pytest.mark.parametrize("kinds", [("lm_head",), ("embed_tokens",), ("embed_tokens", "lm_head")])
def test_a_packed_table_is_untied_whether_dimensions_or_an_outline_say_so(
    shape: Shape, kinds: tuple[str, ...]
) -> None:
    packed = dict.fromkeys(kinds, Packing(bits=4, group_size=32))
    expected = shape.with_packing(packed).tensors
    for kind in ("embed_tokens", "lm_head"):
        end = "weight_packed" if kind in kinds else "weight"
        assert any(name.endswith(f"{kind}.{end}") for name in expected)
    outline = Outline.of_shape(shape, Path()).with_packing(packed)
    assert {name: (info.dtype, info.shape) for name, info in outline.tensors.items()} == expected
    form = find_format(outline.config["quantization_config"])
    modules = ("model.language_model.embed_tokens", "lm_head")
    assert [form.packs(module) for module in modules] == [
        kind in kinds for kind in ("embed_tokens", "lm_head")
    ]


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
