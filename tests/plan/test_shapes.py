"""Checkpoints without weights: the dimensions of published models and of what recipes make of them."""

import json
import shutil

import pytest

from slimqwen import checkpoint, variant
from slimqwen.checkpoint.tensors import list_tensors
from slimqwen.plan import shapes
from slimqwen.serving import in_process

ROOT = variant.repository_root()


@pytest.mark.parametrize(
    ("name", "rows", "packed"),
    [
        ("qwen3.5-4b", 248320, set()),
        ("cyankiwi-seq8-best", 248320, {"mlp"}),
        ("cyankiwi-seq8-best-baked", 248320, {"mlp"}),
        ("cyankiwi-seq8-v64k", 65536, {"mlp"}),
        ("cyankiwi-seq8-w4lm", 248320, {"mlp", "lm_head"}),
        ("cyankiwi-seq8-shortcot-w4lm-v64k-mtp4", 65536, {"mlp", "lm_head"}),
        ("cyankiwi-best", 248320, {"mlp"}),
        ("qwen3.5-4b-best", 65536, {"mlp", "attention", "linear_attention", "mtp", "draft_head"}),
    ],
)
def test_recipes_decide_vocabulary_and_packed_linears(name, rows, packed):
    shape = shapes.variant_shape(variant.load(name))
    assert (shape.text["vocab_size"], set(shape.quantised)) == (rows, packed)
    stored = shape.tensors
    assert stored["model.language_model.embed_tokens.weight"][1] == (rows, 2560)
    assert ("lm_head.weight_packed" in stored) == ("lm_head" in packed)
    assert any(name.startswith("mtp.") and "packed" in name for name in stored) == ("mtp" in packed)


@pytest.fixture
def root(tmp_path, add_variant):
    shutil.copytree(ROOT / "eval" / "shapes", tmp_path / "eval" / "shapes")
    return tmp_path


@pytest.fixture
def tensors_after(root, add_variant):
    """The tensors that a stage of a recipe makes of qwen3.5-4b's."""

    def tensors(**stage):
        recipe = {"description": "a test", "base": "qwen3.5-4b", "stages": [stage]}
        config = add_variant("made", "VLLM_MODEL=weights/made\n")
        config.with_name("recipe.yaml").write_text(json.dumps(recipe))
        add_variant("qwen3.5-4b", "VLLM_MODEL=weights/qwen3.5-4b\n")
        return shapes.variant_shape(variant.load("made", root)).tensors

    return tensors


def test_a_trimmed_draft_vocabulary_adds_rows_and_ids_beside_the_mtp_head(tensors_after):
    stored = tensors_after(trim_draft_vocab={"size": 32768})
    assert stored["mtp.draft_head.weight"] == ("BF16", (32768, 2560))
    assert stored["mtp.draft_head.token_ids"] == ("I64", (32768,))


def test_each_kind_of_linears_has_the_scheme_that_its_recipe_says(tensors_after):
    stored = tensors_after(
        calibrate={
            "targets": {"mlp": "W8A16", "attention": "none", "mtp": "W4A16"},
            "corpus": {"path": "tinyworld"},
        }
    )
    name = "model.language_model.layers.3"
    assert stored[f"{name}.mlp.down_proj.weight_packed"] == ("I32", (2560, 9216 // 4))
    assert stored[f"{name}.mlp.down_proj.weight_scale"] == ("BF16", (2560, 1))
    assert f"{name}.self_attn.q_proj.weight" in stored
    assert stored["mtp.fc.weight_packed"] == ("I32", (2560, 2 * 2560 // 8))


def test_a_written_checkpoint_is_read_like_any_other_and_takes_no_disk(tmp_path):
    shape = shapes.published_shape(ROOT, "cyankiwi")
    shapes.write_shape(shape, tmp_path / "cyankiwi", ROOT / "weights" / "tiny")
    file = tmp_path / "cyankiwi" / "model.safetensors"
    stored = {name: (info.dtype, info.shape) for name, info in list_tensors(file.parent).items()}
    assert stored == shape.tensors
    assert file.stat().st_blocks * 512 < 2**20
    config = json.loads((tmp_path / "cyankiwi" / "config.json").read_text())
    assert config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] == 32


def test_weights_that_nothing_describes_are_named(root, add_variant):
    add_variant("own", "VLLM_MODEL=weights/elsewhere\n")
    with pytest.raises(shapes.ShapeError, match="weights/elsewhere are not known"):
        shapes.variant_shape(variant.load("own", root))


def test_an_unquantised_checkpoint_that_is_there_describes_itself_and_what_recipes_make_of_it():
    assert shapes.variant_shape(variant.load("tiny")).text["hidden_size"] == 192
    by_stage = shapes.shape_by_stage(variant.load("tiny-classic"))
    assert [name for name, _ in by_stage][:3] == ["tiny", "calibrate", "prune_vocab"]
    assert by_stage[0][1].source == "weights/tiny/config.json"
    assert (by_stage[-1][1].text["vocab_size"], set(by_stage[-1][1].quantised)) == (7936, {"mlp"})


def test_a_quantised_checkpoint_without_a_recipe_does_not_describe_itself(root, add_variant):
    add_variant("own", "VLLM_MODEL=weights/own\n")
    (root / "weights" / "own").mkdir(parents=True)
    config = json.loads((ROOT / "weights" / "tiny" / "config.json").read_text()) | {
        "quantization_config": {"quant_method": "compressed-tensors"}
    }
    (root / "weights" / "own" / "config.json").write_text(json.dumps(config))
    with pytest.raises(shapes.ShapeError, match="no unquantised checkpoint"):
        shapes.variant_shape(variant.load("own", root))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "Invalid JSON"),
        ('{"source": "s", "unknown": 1}', "unknown: Extra inputs"),
        ('{"source": "s"}', "has no config, and no base that is in .*git checkout"),
        ('{"source": "s", "base": "nothing"}', "has no config, and no base"),
    ],
)
def test_a_damaged_file_is_named_with_its_field(root, content, reason):
    (root / "eval" / "shapes" / "bad.json").write_text(content)
    with pytest.raises(shapes.ShapeError, match=reason):
        shapes.published_shape(root, "bad")


@pytest.mark.engine
def test_the_dimensions_that_a_recipe_ends_with_are_served_with_dummy_weights(root, add_variant):
    from vllm import SamplingParams  # slow, and only this test needs it

    (root / "weights").mkdir()
    (root / "weights" / "tiny").symlink_to(ROOT / "weights" / "tiny")
    add_variant("tiny", "VLLM_MODEL=weights/tiny\n")
    config = add_variant("made", "BASE=tiny\nVLLM_MODEL=weights/made\n")
    stages = [
        {"calibrate": {"targets": {"mlp": "W4A16", "mtp": "W8A16"}, "corpus": {"path": "tinyworld"}}},
        {"prune_vocab": {"size": 4096, "corpus": {"path": "tinyworld"}}},
        {"sample_outputs": {"prompts": {"path": "tinyworld_prompts"}}},
        {"trim_draft_vocab": {"size": 1024}},
    ]
    recipe = {"description": "a test", "base": "tiny", "stages": stages}
    config.with_name("recipe.yaml").write_text(json.dumps(recipe))
    for _ in range(2):  # the second call writes it anew
        folder = shapes.write_variant_shape(variant.load("made", root))
    assert folder == root / "weights" / "shape-made"
    assert checkpoint.verify(folder, "no cure").facts["dimensions"].endswith("made/recipe.yaml")
    assert checkpoint.has_random_weights(folder)
    with in_process.engine(folder, load_format="dummy", num_speculative_tokens=2) as llm:
        settings = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        [output] = llm.generate([{"prompt_token_ids": [1, 2, 3]}], settings, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 8
        assert max(output.outputs[0].token_ids) < 4096
