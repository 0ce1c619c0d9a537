"""`variant remove`: what it deletes, what it keeps, and what it refuses because another variant needs it."""

import subprocess
from pathlib import Path

import pytest

from slimqwen.checkpoint.files import Manifest, file_records
from slimqwen.recipe import removal, variant_recipe
from slimqwen.recipe.removal import RemovalError, plan_removal, remove_variant
from slimqwen.workspace import create_workspace


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A workspace with the variant `old`, whose weights a recipe made."""
    create_workspace(tmp_path)
    add(tmp_path, "old", "BASE=tiny\nVLLM_MODEL=weights/old\n")
    output = tmp_path / "weights" / "store" / "0123456789abcdef"
    output.mkdir(parents=True)
    (output / "model.safetensors").write_bytes(bytes(1000))
    Manifest(
        stage="calibrate", key=output.name, ingredients={}, files=file_records(output), wall_seconds=1,
        peak_memory_bytes=1, versions={},
    ).write(output)  # fmt: skip
    (tmp_path / "weights" / "old").symlink_to(output)
    return tmp_path


def add(root: Path, name: str, lines: str, baseline: str = "tiny", recipe: str = "") -> None:
    folder = root / "experiments" / name
    folder.mkdir()
    (folder / "config.env").write_text(lines)
    (folder / "measurements.json").write_text(f'{{"hypothesis": "x", "baseline": "{baseline}"}}')
    if recipe:
        (folder / "recipe.yaml").write_text(recipe)


def test_it_deletes_the_folder_the_link_and_the_outputs_that_nothing_else_uses(root):
    planned = plan_removal("old", root)
    said = planned.describe()
    assert (
        said[0]
        == "deletes 2 files of experiments/old, 2 of which git does not hold: config.env, measurements.json"
    )
    assert said[1].startswith("deletes weights/old, and the outputs")
    remove_variant(planned)
    assert variant_recipe.clean(root) >= 1000
    left = [path.name for path in (root / "experiments").iterdir()]
    assert left == [".gitkeep"]
    assert not (root / "weights" / "old").is_symlink()
    assert not (root / "weights" / "store" / "0123456789abcdef").exists()
    assert list((root / ".cache").glob("removed-*")) == []


def test_a_recipe_whose_base_no_variant_has_is_no_obstacle(root):
    add(root, "new", "BASE=tiny\n", recipe="base: owner/elsewhere\nstages: []\n")
    assert plan_removal("old", root).folder.name == "old"


@pytest.mark.parametrize(
    ("lines", "baseline", "recipe", "how"),
    [
        ("BASE=old\n", "tiny", "", "BASE of new"),
        ("BASE=tiny\nVLLM_MODEL=weights/old\n", "tiny", "", "a line with weights/old of new"),
        ("BASE=tiny\n", "old", "", "the baseline of new"),
        ("BASE=tiny\n", "tiny", "base: old\n", "the recipe's base of new"),
        (
            'BASE=tiny\nVLLM_SPECULATIVE_CONFIG=\'{"model": "weights/old"}\'\n', "tiny", "",
            "a line with weights/old of new",
        ),
    ],
)  # fmt: skip
def test_what_another_variant_needs_stays_and_the_other_removed_it_goes(root, lines, baseline, recipe, how):
    add(root, "new", lines, baseline, recipe)
    with pytest.raises(RemovalError, match=f"^old is needed: {how}; change or remove it first$"):
        plan_removal("old", root)
    remove_variant(plan_removal("new", root))
    remove_variant(plan_removal("old", root))


def test_a_shipped_variant_and_one_that_is_not_there_are_refused(root):
    with pytest.raises(RemovalError, match=r"^tiny-best is a part of the installation; "):
        plan_removal("tiny-best", root)
    with pytest.raises(RemovalError, match=r"^nobody does not exist here; "):
        plan_removal("nobody", root)


def test_a_folder_of_weights_that_no_recipe_made_stays(root):
    (root / "weights" / "own").mkdir()
    (root / "weights" / "own" / "model.safetensors").write_bytes(bytes(10))
    add(root, "own", "BASE=tiny\nVLLM_MODEL=weights/own\n")
    planned = plan_removal("own", root)
    assert "keeps weights/own" in planned.describe()[1]
    remove_variant(planned)
    assert (root / "weights" / "own" / "model.safetensors").is_file()


def test_files_that_git_holds_are_said_to_stay_in_its_history(root):
    for arguments in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", "-C", str(root), *arguments], check=True)
    assert plan_removal("old", root).describe()[0].endswith("; git's history keeps them")


def test_a_removal_that_is_cut_short_leaves_no_half_of_a_variant(root, monkeypatch):
    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(removal.shutil, "rmtree", die)
    with pytest.raises(KeyboardInterrupt):
        remove_variant(plan_removal("old", root))
    assert not (root / "experiments" / "old").exists()
