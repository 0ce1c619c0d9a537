"""A recipe for a new variant can be read, and a mistake in its stages is one line."""

import pytest

from slimqwen import variant
from slimqwen.checkpoint import MissingCheckpointError
from slimqwen.recipe import recipe_file, template
from slimqwen.recipe.recipe_file import RecipeError
from slimqwen.recipe.registry import STAGES


def read(tmp_path, text):
    file = tmp_path / "experiments" / "new" / "recipe.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return recipe_file.read_recipe(file)


@pytest.fixture
def large(tmp_path, add_variant):
    """A family of its own whose weights are not here."""
    add_variant("large", "SOURCE=o/large\nVLLM_MODEL=weights/large\n")
    return variant.load("large", tmp_path)


def test_a_recipe_of_every_stage_can_be_read(tmp_path):
    chain = [
        "sample_outputs",
        "trim_draft_vocab",
        "redistill_mtp",
    ]  # each reads what the one before it leaves
    stages = sorted({*STAGES} - {*chain}) + chain
    stages.sort(key=lambda name: STAGES[name].last)
    recipe = read(tmp_path, template.render(variant.load("tiny-mtp4"), stages))
    assert [step.stage.name for step in recipe.steps] == stages
    assert recipe.base == "tiny-mtp4"
    parameters = {step.stage.name: step.parameters for step in recipe.steps}
    assert parameters["prune_vocab"].size == 4096
    texts = variant.repository_root() / "eval" / "texts"
    assert parameters["calibrate"].corpus.path == texts / "tinyworld.jsonl"
    assert parameters["sample_outputs"].prompts.path == texts / "tinyworld_prompts.jsonl"


def test_a_family_that_is_not_the_embedded_one_reads_a_file_of_its_own(tmp_path, large):
    recipe = read(tmp_path, template.render(large, ["calibrate"]))
    path = recipe.steps[0].parameters.corpus.path
    assert path.resolve() == (tmp_path / "corpora" / "large.jsonl").resolve()


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (["calibrat"], r"no stage 'calibrat'; did you mean calibrate\?"),
        (["bake_cache", "calibrate"], "no stage may follow bake_cache"),
    ],
)
def test_stages_that_cannot_be_are_one_line(stages, message):
    with pytest.raises(RecipeError, match=message) as caught:
        template.render(variant.load("tiny"), stages)
    assert "/tmp" not in str(caught.value)


def test_a_stage_that_needs_the_checkpoint_says_how_to_get_it(large):
    with pytest.raises(MissingCheckpointError, match="download"):
        template.render(large, ["prune_vocab"])
