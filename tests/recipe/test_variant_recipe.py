"""Recipes of variants: how far they run, and which changes of a checkpoint no stage explains."""

import json
import shutil
from pathlib import Path

import pytest

from slimqwen import variant
from slimqwen.checkpoint import Manifest
from slimqwen.checkpoint.files import VOCAB_MAP, bytes_on_disk
from slimqwen.recipe import variant_recipe
from slimqwen.recipe.recipe_file import RecipeError, find_base_variant
from tests.checkpoints import edited_tensors

ROOT = variant.repository_root()
DRAFT_FC, DECAY, NORM = "mtp.fc.weight", "model.layers.1.linear_attn.A_log", "model.norm.weight"
RECIPE = "description: A test.\nbase: tiny\nstages: [{quantise_lm_head: {group_size: 32}}]\n"
SAMPLING = "{sample_outputs: {prompts: {path: tinyworld_prompts}}}"
DISTILLING = f"description: A test.\nbase: tiny\nstages: [{SAMPLING}, {{redistill_mtp: {{}}}}]\n"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for folder in ("experiments/tiny", "weights/tiny"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    return tmp_path


def changed_variant(root: Path, recipe: str, *names: str) -> variant.Variant:
    """A variant whose checkpoint is tiny's with these tensors made larger by 3 %."""
    weights = shutil.copytree(root / "weights" / "tiny", root / "weights" / "changed")
    with edited_tensors(weights) as tensors:
        for name in names:
            tensors[name] = (tensors[name].float() * 1.03).to(tensors[name].dtype)
    folder = root / "experiments" / "changed"
    folder.mkdir()
    (folder / "config.env").write_text("BASE=tiny\nVLLM_MODEL=weights/changed\n")
    (folder / "recipe.yaml").write_text(recipe)
    shutil.copy(root / "experiments" / "tiny" / "measurements.json", folder)
    return variant.load("changed", root)


@pytest.mark.parametrize("name", [DECAY, NORM, DRAFT_FC])
def test_a_small_change_of_a_tensor_that_no_stage_touches_is_named(repository, name):
    damaged = changed_variant(repository, RECIPE, name)
    assert variant_recipe.unexplained_changes(damaged) == [name]


def test_what_a_stage_changes_is_explained(repository):
    distilled = changed_variant(repository, DISTILLING, DRAFT_FC, DECAY)
    assert variant_recipe.unexplained_changes(distilled) == [DECAY]


def test_a_setting_that_no_stage_changes_is_named_and_one_of_a_stage_is_not(repository):
    subject = changed_variant(repository, RECIPE)
    file = subject.weights / "config.json"
    config = json.loads(file.read_text())
    assert variant_recipe.unexplained_settings(subject) == []
    config["rope_parameters"]["rope_theta"] *= 1.5
    file.write_text(json.dumps({**config, "tie_word_embeddings": False, "rms_norm_eps": 1e-3}))
    assert variant_recipe.unexplained_settings(subject) == ["rms_norm_eps", "rope_parameters"]


def test_a_chat_template_or_tokenizer_that_no_stage_changes_is_named(repository):
    subject = changed_variant(repository, RECIPE)
    assert variant_recipe.unexplained_files(subject) == []
    tokenizer = subject.weights / "tokenizer.json"
    tokenizer.write_text(json.dumps({**json.loads(tokenizer.read_text()), "added_tokens": []}))
    (subject.weights / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert variant_recipe.unexplained_files(subject) == ["chat_template.jinja", "tokenizer.json"]
    (subject.weights / VOCAB_MAP).touch()
    assert variant_recipe.unexplained_files(subject) == ["chat_template.jinja"]


def test_a_stage_is_found_by_the_first_of_its_name(repository):
    rounded = "{quantise_lm_head: {}}, {quantise_lm_head: {group_size: 64}}"
    twice = f"description: A test.\nbase: tiny\nstages: [{SAMPLING}, {rounded}]\n"
    subject = changed_variant(repository, twice)
    assert variant_recipe.stages_until(subject, "quantise_lm_head") == 2
    with pytest.raises(
        RecipeError, match="no stage nope; choose one of sample_outputs, quantise_lm_head, quantise_lm_head"
    ):
        variant_recipe.stages_until(subject, "nope")


def test_a_base_is_outlined_before_it_is_whole(repository):
    subject = changed_variant(repository, RECIPE)
    outline = variant_recipe.base_outline(subject)
    assert outline is not None
    assert outline.tensors[NORM].shape == (192,)
    (repository / "weights" / "tiny" / "config.json").unlink()
    assert variant_recipe.base_outline(subject) is None
    other = repository / "experiments" / "other"
    shutil.copytree(repository / "experiments" / "tiny", other)
    commit, another = "0" * 39 + "1", "0" * 39 + "2"
    (other / "config.env").write_text(f"SOURCE=owner/name\nREVISION={commit}\nVLLM_MODEL=weights/other\n")
    for base in ("owner/name", f"owner/name@{commit}"):
        assert find_base_variant(base, repository) == "other"
    for base in ("owner/nome", f"owner/name@{another}"):
        with pytest.raises(
            RecipeError, match=f"add one with `slimqwen variant new --name NAME --checkpoint {base}`"
        ):
            find_base_variant(base, repository)


def test_the_costs_of_a_recipe_come_with_all_of_its_faults(repository):
    subject = changed_variant(repository, RECIPE.replace("32", "33"))
    outline = variant_recipe.base_outline(subject)
    [fault], [cost] = variant_recipe.inspect_recipe(subject, outline)
    assert "group_size: Input should be 32, 64 or 128" in fault
    assert cost.needs.disk_bytes > outline.disk_bytes
    shutil.rmtree(subject.weights)
    with pytest.raises(RecipeError, match="group_size"):
        variant_recipe.run_recipe(subject)


@pytest.mark.parametrize(
    "line",
    [
        "VLLM_MODEL=weights/store/{entry}",
        "VLLM_MODEL=models/linked",
        "VLLM_TOKENIZER=weights/store/{entry}",
        """VLLM_SPECULATIVE_CONFIG='{{"model": "weights/store/{entry}", "num_speculative_tokens": 2}}'""",
        "VLLM_CHAT_TEMPLATE=weights/store/{entry}/chat_template.jinja",
    ],
)
def test_a_checkpoint_that_a_variant_serves_survives_cleaning(repository, line):
    kept, dropped = "a" * 64, "b" * 64
    for entry in (kept, dropped):
        folder = shutil.copytree(repository / "weights" / "tiny", repository / "weights" / "store" / entry)
        Manifest.read(folder).model_copy(update={"ingredients": {"input": "no entry"}}).write(folder)
    (repository / "models").mkdir()
    (repository / "models" / "linked").symlink_to(repository / "weights" / "store" / kept)
    serving = repository / "experiments" / "serving"
    serving.mkdir()
    (serving / "config.env").write_text(f"BASE=tiny\n{line.format(entry=kept)}\n")
    shutil.copy(repository / "experiments" / "tiny" / "measurements.json", serving)
    variant_recipe.clean(repository)
    left = [path.name for path in (repository / "weights" / "store").iterdir() if path.name[0] != "."]
    assert left == [kept]


def test_what_a_removed_variant_left_is_named_with_its_size(repository):
    kept = "a" * 64
    folder = shutil.copytree(repository / "weights" / "tiny", repository / "weights" / "store" / kept)
    Manifest.read(folder).model_copy(update={"ingredients": {"input": "no entry"}}).write(folder)
    link = repository / "weights" / "gone"
    link.symlink_to(Path("store") / kept)
    assert variant_recipe.clean(repository) == 0
    assert variant_recipe.list_orphaned_links(repository) == {link: bytes_on_disk(folder)}
    serving = repository / "experiments" / "serving"
    serving.mkdir()
    (serving / "config.env").write_text("BASE=tiny\nVLLM_MODEL=weights/gone\n")
    shutil.copy(repository / "experiments" / "tiny" / "measurements.json", serving)
    assert variant_recipe.list_orphaned_links(repository) == {}
    shutil.rmtree(serving)
    link.unlink()
    assert variant_recipe.list_orphaned_links(repository) == {}
    assert variant_recipe.clean(repository) > 0
