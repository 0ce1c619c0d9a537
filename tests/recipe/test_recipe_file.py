"""A recipe.yaml is read whole or refused with its file, its line and the nearest name that is known."""

from pathlib import Path

import pytest

from slimqwen import variant
from slimqwen.recipe import recipe_file
from slimqwen.recipe.recipe_file import RecipeError
from slimqwen.recipe.stages.calibrate import CalibrateParameters
from slimqwen.recipe.stages.quantise_lm_head import QuantiseLmHeadParameters

GOOD = """\
description: four bits
base: tiny
stages:
  - calibrate:
      group_size: 64
      targets: {mlp: W4A16_ASYM, linear_attention: W4A16_ASYM}
      corpus:
        path: text.txt
        sequences: 8
"""


SAMPLING = "sample_outputs: {prompts: {path: tinyworld_prompts}}"


def write(folder: Path, text: str) -> Path:
    file = folder / "recipe.yaml"
    file.write_text(text)
    return file


def test_a_recipe_is_read_with_defaults_filled_in(tmp_path: Path) -> None:
    recipe = recipe_file.read_recipe(write(tmp_path, GOOD))
    assert (recipe.description, recipe.base) == ("four bits", "tiny")
    [step] = recipe.steps
    assert step.stage.name == "calibrate"
    assert isinstance(step.parameters, CalibrateParameters)
    assert step.parameters.group_size == 64
    assert step.parameters.targets.schemes == dict.fromkeys(("mlp", "linear_attention"), "W4A16_ASYM")
    assert step.parameters.corpus.length == 256
    assert step.parameters.corpus.path == tmp_path / "text.txt"


def test_a_stage_may_have_no_parameters_of_its_own(tmp_path: Path) -> None:
    text = "description: d\nbase: o/n\nstages:\n  - quantise_lm_head:\n"
    recipe = recipe_file.read_recipe(write(tmp_path, text))
    assert recipe.steps[0].parameters == QuantiseLmHeadParameters()
    assert recipe.base == "o/n"


@pytest.mark.parametrize(
    ("old", "new", "line", "expected"),
    [
        ("group_size: 64", "group_sise: 64", 5, "unknown key 'group_sise'; did you mean group_size?"),
        ("- calibrate", "- calibrat", 4, "no stage 'calibrat'; did you mean calibrate?"),
        ("- calibrate", "- xyz", 4, "no stage 'xyz'; known are bake_cache, calibrate"),
        ("base: tiny", "bas: tiny", 2, "unknown key 'bas'; did you mean base?"),
        ("group_size: 64", "group_size: 48", 5, "group_size: Input should be 32, 64 or 128, here is 48"),
        (
            "linear_attention: W4A16_ASYM",
            "lm_head: W4A16",
            6,
            "unknown key 'lm_head'; known are attention, linear_attention, mlp, mtp",
        ),
        ("base: tiny", "base: a/b/c", 2, "base: String should match"),
        ("sequences: 8", "sequences: 0", 9, "greater than or equal to 1, here is 0"),
        ("path: text.txt", "path:", 8, "corpus.path is not filled in; write a value"),
        ("  - calibrate:", "  - other: {}\n    calibrate:", 4, "one stage per list entry, this one has 2"),
        ("description: four bits", "description: ''", 1, "description: String should have at least 1"),
        ("description: four bits", "description: [", 3, "not usable YAML"),
    ],
)
def test_a_mistake_is_an_error_with_its_line(
    tmp_path: Path, old: str, new: str, line: int, expected: str
) -> None:
    assert old in GOOD
    file = write(tmp_path, GOOD.replace(old, new))
    with pytest.raises(RecipeError) as caught:
        recipe_file.read_recipe(file)
    message = str(caught.value)
    assert message.startswith(f"{file}:{line}: ")
    assert expected in message
    assert "\n" not in message


TEXTS = """\
description: d
base: tiny
{corpus}stages:
  - calibrate: {{corpus: {{sequences: 2, length: 100}}}}
  - quantise_lm_head: {{rounding: gptq, corpus: {{sequences: 3, length: 100}}}}
  - sample_outputs: {{prompts: {{path: tinyworld_prompts}}}}
"""


def test_the_model_writes_the_text_of_a_recipe_that_names_none(tmp_path: Path) -> None:
    write_text, *steps = recipe_file.read_recipe(write(tmp_path, TEXTS.format(corpus=""))).steps
    assert write_text.stage.name == "write_text"
    assert write_text.parameters.model_dump()["tokens"] == 300
    assert [step.parameters.corpus.is_own for step in steps[:2]] == [True, True]  # type: ignore[attr-defined]
    assert steps[0].stage.data(steps[0].parameters) == {}


@pytest.mark.parametrize(
    ("corpus", "name"),
    [
        ("mine.jsonl", "mine.jsonl"),
        ("tinyworld", "tinyworld.jsonl"),
        ("general", "general-tiny.jsonl"),
    ],
)
def test_a_recipe_says_its_text_once(tmp_path: Path, corpus: str, name: str) -> None:
    recipe = recipe_file.read_recipe(write(tmp_path, TEXTS.format(corpus=f"corpus: {corpus}\n")))
    read = [step.parameters.corpus.path.name for step in recipe.steps[:2]]  # type: ignore[attr-defined]
    assert read == [name, name]
    assert recipe.steps[2].parameters.prompts.path.name == "tinyworld_prompts.jsonl"  # type: ignore[attr-defined]


@pytest.mark.parametrize("said", ["", ", corpus: {path: self}"])
def test_a_vocabulary_is_never_pruned_by_the_models_own_text(tmp_path: Path, said: str) -> None:
    text = f"description: d\nbase: tiny\nstages:\n  - prune_vocab: {{size: 64{said}}}\n"
    with pytest.raises(RecipeError, match=r"does not say what its users write.*write `general`, or a file"):
        recipe_file.read_recipe(write(tmp_path, text))


@pytest.mark.parametrize("key", ["description", "base", "stages"])
def test_a_missing_part_is_named(tmp_path: Path, key: str) -> None:
    parts = {
        "description": "description: d\n",
        "base": "base: b\n",
        "stages": "stages:\n  - quantise_lm_head:\n",
    }
    del parts[key]
    with pytest.raises(RecipeError, match=f"{key} is missing; add it"):
        recipe_file.read_recipe(write(tmp_path, "".join(parts.values())))


@pytest.mark.parametrize("text", ["", "- a\n", "description: d\nbase: b\nstages: []\n"])
def test_what_is_no_recipe_at_all_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(RecipeError, match=r"recipe\.yaml:"):
        recipe_file.read_recipe(write(tmp_path, text))


@pytest.mark.parametrize(
    ("stages", "line", "message"),
    [
        (
            [SAMPLING, "prune_vocab: {size: 64, corpus: {path: tinyworld}}", "redistill_mtp"],
            6,
            "sample_outputs or trim_draft_vocab",
        ),
        (["quantise_lm_head", "trim_draft_vocab: {size: 64}"], 5, "sample_outputs"),
    ],
)
def test_a_stage_whose_text_is_lost_on_the_way_is_refused(
    tmp_path: Path, stages: list[str], line: int, message: str
) -> None:
    lines = "\n".join(f"  - {stage}" if ":" in stage else f"  - {stage}:" for stage in stages)
    file = write(tmp_path, f"description: d\nbase: b\nstages:\n{lines}\n")
    with pytest.raises(
        RecipeError, match=rf":{line}: .* reads a file that {message} writes; put .* right after that stage"
    ):
        recipe_file.read_recipe(file)


def test_a_missing_recipe_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"recipe\.yaml is missing; write a recipe into that file"):
        recipe_file.read_recipe(tmp_path / "recipe.yaml")


@pytest.mark.parametrize("name", [name for name in variant.names() if variant.load(name).recipe])
def test_every_recipe_of_this_repository_can_be_read(name: str) -> None:
    file = variant.load(name).recipe
    assert file is not None
    assert recipe_file.read_recipe(file).steps
