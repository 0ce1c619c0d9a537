import json
import shutil

import pytest

from slimqwen import variant
from slimqwen.checkpoint.files import file_records
from slimqwen.report.lineage import Family, parameters

ROOT = variant.repository_root()


@pytest.fixture
def family(add_variant, tmp_path):
    add_variant("root", "VLLM_MODEL=weights/root\nVLLM_DTYPE=bfloat16\nVLLM_MAX_NUM_SEQS=1\n")
    add_variant("child", "BASE=root\nVLLM_MAX_NUM_SEQS=8\nVLLM_DTYPE=\n# why\nVLLM_PORT=1\n", baseline="root")
    add_variant("sibling", "BASE=root\n")
    add_variant("grandchild", "BASE=child\n", baseline="root")
    return lambda: Family(tmp_path)


def test_flags_are_a_diff_with_places(family):
    changes = {one.key: one for one in family().changes("child")}

    assert {key: (one.before, one.after) for key, one in changes.items()} == {
        "VLLM_DTYPE": ("bfloat16", None),
        "VLLM_MAX_NUM_SEQS": ("1", "8"),
        "VLLM_PORT": (None, "1"),
    }
    assert changes["VLLM_PORT"].location == "experiments/child/config.env:5"
    assert changes["VLLM_DTYPE"].location == "experiments/child/config.env:3"


def test_a_variant_without_a_base_shows_all_its_flags(family):
    assert [(one.key, one.before) for one in family().changes("root")] == [
        ("VLLM_MODEL", None), ("VLLM_DTYPE", None), ("VLLM_MAX_NUM_SEQS", None)
    ]  # fmt: skip
    assert family().changes("sibling") == []


def test_the_tree_leads_from_the_oldest_base_to_what_comes_from_the_variant(family):
    def names(kin):
        return {kin.name: [names(child) for child in kin.children]}

    tree = family().tree("child")
    assert names(tree) == {"root": [{"child": [{"grandchild": []}]}]}
    assert "its baseline" in tree.notes


def test_a_variant_that_cannot_be_read_is_a_problem_and_the_others_are_there(family, tmp_path):
    (tmp_path / "experiments" / "child" / "config.env").write_text("BASE=nobody\n")

    kin = family()

    assert set(kin.members) == {"root", "sibling"}
    assert [one.location for one in kin.problems] == [
        "experiments/child/config.env", "experiments/grandchild/config.env"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text", ["", "[]", "stages: 3", "description: x\nbase: y\nstages: [{}]", "{", "\x00"]
)
def test_a_recipe_that_is_none_is_left_out(family, tmp_path, text):
    (tmp_path / "experiments" / "child" / "recipe.yaml").write_text(text)

    assert family().recipe("child") is None


def test_a_recipe_is_told_by_stage_and_dotted_parameter():
    recipe = Family(ROOT).recipe("tiny-classic")

    assert recipe.base == "tiny"
    assert [step.stage.name for step in recipe.steps][:2] == ["calibrate", "prune_vocab"]
    assert parameters(recipe.steps[0])["corpus.source"] == "tinyworld"
    assert parameters(recipe.steps[0])["targets.mlp"] == "W4A16"


def test_sizes_of_stages_come_from_the_manifests_on_this_machine(add_variant, tmp_path):
    add_variant("root", "VLLM_MODEL=weights/root\n")
    add_variant("made", "BASE=root\nVLLM_MODEL=weights/made\n", baseline="root")
    (tmp_path / "experiments" / "made" / "recipe.yaml").write_text(
        "description: d\nbase: root\nstages:\n  - quantise_lm_head:\n  - redistill_mtp:\n"
    )
    base = _checkpoint(tmp_path / "weights" / "root", 900)
    first = _checkpoint(tmp_path / "weights" / "store" / "1", 500, "calibrate", base)
    _checkpoint(tmp_path / "weights" / "store" / "2", 300, "prune_vocab", first)
    (tmp_path / "weights" / "made").symlink_to("store/2")

    sizes = Family(tmp_path).stage_sizes("made")

    assert [one.stage for one in sizes] == ["root", "calibrate", "prune_vocab"]
    assert [one.size_bytes for one in sizes] == [900, 500, 300]
    shutil.rmtree(tmp_path / "weights" / "store" / "1")
    assert Family(tmp_path).stage_sizes("made") == []


def _checkpoint(folder, size, stage="train", source=""):
    from slimqwen import checkpoint

    folder.mkdir(parents=True)
    (folder / "model.bin").write_bytes(folder.name.encode().ljust(size, b"."))
    checkpoint.Manifest(
        stage=stage,
        ingredients={"input": source},
        files=file_records(folder),
        wall_seconds=1.0,
        peak_memory_bytes=1,
        versions={},
    ).write(folder)
    assert json.loads((folder / "manifest.json").read_text())
    return checkpoint.digest(folder)
