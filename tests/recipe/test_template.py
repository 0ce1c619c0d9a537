"""A recipe for a new variant has every parameter, and can be run as it is written."""

import pytest
import yaml

from slimqwen import variant
from slimqwen.recipe import recipe_file, template
from slimqwen.recipe.recipe_file import RecipeError
from slimqwen.recipe.registry import STAGES

CHAIN = ["sample_outputs", "trim_draft_vocab", "redistill_mtp"]  # each reads what the one before it leaves


def write_recipe(tmp_path, text):
    file = tmp_path / "experiments" / "new" / "recipe.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_a_recipe_of_every_stage_names_its_text_once(tmp_path):
    stages = sorted({*STAGES} - {*CHAIN, "unpack"}) + CHAIN  # a twin has no parameters, and no stage after it
    stages.sort(key=lambda name: STAGES[name].last)
    text = template.render_recipe(variant.load("tiny-mtp4"), stages, "tinyworld")
    assert "path:" not in text
    recipe = recipe_file.read_recipe(write_recipe(tmp_path, text))
    assert [step.stage.name for step in recipe.steps] == stages
    assert recipe.base == "tiny-mtp4"
    for step, entry in zip(recipe.steps, yaml.safe_load(text)["stages"], strict=True):
        schema = step.stage.parameters
        assert list(entry[step.stage.name]) == list(schema.model_fields)
        required = {name for name, field in schema.model_fields.items() if field.is_required()}
        defaults = schema.model_validate(
            {name: entry[step.stage.name][name] for name in required},
            context={"folder": tmp_path / "experiments" / "new", "corpus": "tinyworld"},
        )
        assert step.parameters == defaults
    texts = variant.repository_root() / "eval" / "texts"
    parameters = {step.stage.name: step.parameters for step in recipe.steps}
    assert parameters["prune_vocab"].size == "50%"
    assert parameters["calibrate"].corpus.path == texts / "tinyworld.jsonl"


def test_a_recipe_without_a_text_has_the_model_write_it_but_not_for_pruning(tmp_path):
    text = template.render_recipe(variant.load("tiny"), ["prune_vocab", "calibrate"])
    recipe = recipe_file.read_recipe(write_recipe(tmp_path, text))
    assert [step.stage.name for step in recipe.steps] == ["write_text", "prune_vocab", "calibrate"]
    assert recipe.steps[1].parameters.corpus.path.name == "general-tiny.jsonl"
    assert recipe.steps[2].parameters.corpus.is_own


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (["calibrat"], r"no stage 'calibrat'; did you mean calibrate\?"),
        (["bake_cache", "calibrate"], "no stage may follow bake_cache"),
    ],
)
def test_stages_that_cannot_be_are_one_line(stages, message):
    with pytest.raises(RecipeError, match=rf"--stage: {message}"):
        template.render_recipe(variant.load("tiny"), stages)
