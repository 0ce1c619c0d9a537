"""A new variant appears whole, passes what every variant has to pass, and a mistake leaves nothing behind."""

import json
from pathlib import Path

import pytest

from slimqwen import scaffold, variant
from slimqwen.checkpoint import MissingCheckpointError
from slimqwen.recipe import recipe_file
from slimqwen.recipe.recipe_file import RecipeError
from slimqwen.recipe.registry import STAGES
from slimqwen.records import collection, store
from slimqwen.report import tables
from slimqwen.scaffold import ScaffoldError
from slimqwen.serving import flags
from slimqwen.variant import UnknownVariantError

ROOT = Path(__file__).parents[1]
HYPOTHESIS = "It loses nothing."


@pytest.fixture
def repository(tmp_path, add_variant):
    """A baseline with weights, a variant of it that only changes flags, and a family whose weights are not here."""
    add_variant("tiny", "VLLM_MODEL=weights/tiny\n")
    add_variant("tiny-seq8", "BASE=tiny\nVLLM_MAX_NUM_SEQS=8\n", baseline="tiny")
    add_variant("large", "SOURCE=o/large\nVLLM_MODEL=weights/large\n")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "tiny").symlink_to(ROOT / "weights" / "tiny")
    readme = tmp_path / "README.md"
    readme.write_text("<!-- table:variants -->\n<!-- end -->\n")
    return tmp_path


def content(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_variant_without_a_recipe_serves_what_its_base_serves(repository):
    folder = scaffold.create("new", "tiny-seq8", "  It loses\n nothing. ", root=repository)
    made = variant.load("new", repository)
    assert folder == made.folder
    assert made.hypothesis == HYPOTHESIS
    assert made.baseline == "tiny"
    assert made.weights == repository / "weights" / "tiny"
    assert made.settings["VLLM_MAX_NUM_SEQS"].value == "8"
    assert made.recipe is None
    assert store.read_measurements(folder)["status"] == "planned"
    page = (folder / "README.md").read_text()
    assert f"**Hypothesis.** {HYPOTHESIS}" in page
    # The tables fill when there are records; until then they say how to get some.
    for command in ("make gate VARIANT=new", "make eval-quality VARIANT=new"):
        assert f"`{command}` makes one." in page
    assert [file.name for file in tables.outdated(repository)] == ["README.md"]  # the list of variants


def test_the_base_of_a_baseline_is_the_baseline(repository):
    scaffold.create("new", "tiny", HYPOTHESIS, root=repository)
    assert variant.load("new", repository).baseline == "tiny"


def test_a_variant_with_every_stage_has_a_recipe_that_can_be_read_and_weights_of_its_own(repository):
    scaffold.create("new", "tiny-seq8", HYPOTHESIS, stages=list(STAGES), root=repository)
    made = variant.load("new", repository)
    recipe = recipe_file.read(made.recipe)
    assert [step.stage.name for step in recipe.steps] == list(STAGES)
    assert recipe.base == "tiny-seq8"
    assert made.weights == repository / "weights" / "new"
    assert variant.making_command(made.weights, repository) == "`make recipe VARIANT=new` makes it"
    assert {step.stage.name: step.parameters for step in recipe.steps}["prune_vocab"].size == 4096


def test_a_family_that_is_not_the_embedded_one_reads_a_file_of_its_own(repository):
    scaffold.create("new", "large", HYPOTHESIS, stages=["calibrate"], root=repository)
    recipe = recipe_file.read(repository / "experiments" / "new" / "recipe.yaml")
    path = recipe.steps[0].parameters.corpus.path
    assert path.resolve() == (repository / "corpora" / "large.jsonl").resolve()


def test_the_new_variant_passes_what_is_checked_of_all(repository):
    scaffold.create("new", "tiny", HYPOTHESIS, stages=["calibrate"], root=repository)
    found = collection.collect(repository)
    assert found.problems == ()
    assert found.measurements["new"]["hypothesis"] == HYPOTHESIS
    (fresh,) = tables.outdated(repository).values()
    assert f"| new | {HYPOTHESIS} | tiny | planned |" in fresh
    assert flags.resolve(variant.load("new", repository))


@pytest.mark.parametrize(
    "name", ["", ".hidden", "../out", "a/b", "-x", "with space", "ü", "x" * 65, "store", "new\n"]
)
def test_a_bad_name_is_refused(repository, name):
    before = content(repository)
    with pytest.raises(ScaffoldError, match="cannot name a variant"):
        scaffold.create(name, "tiny", HYPOTHESIS, root=repository)
    assert content(repository) == before


@pytest.mark.parametrize("hypothesis", ["", " \n\t", "<!-- table:results tiny -->"])
def test_a_hypothesis_that_is_none_is_refused(repository, hypothesis):
    before = content(repository)
    with pytest.raises(ScaffoldError, match="needs a hypothesis"):
        scaffold.create("new", "tiny", hypothesis, root=repository)
    assert content(repository) == before


def test_a_second_variant_of_one_name_is_refused_and_the_first_is_left_alone(repository):
    scaffold.create("new", "tiny", HYPOTHESIS, root=repository)
    before = content(repository)
    with pytest.raises(ScaffoldError, match="experiments/new is there already"):
        scaffold.create("new", "tiny", "Another.", root=repository)
    assert content(repository) == before


def test_an_unknown_base_names_the_nearest(repository):
    with pytest.raises(UnknownVariantError, match=r"did you mean tiny\?"):
        scaffold.create("new", "tinny", HYPOTHESIS, root=repository)
    assert not (repository / "experiments" / "new").exists()


@pytest.mark.parametrize(
    ("stages", "told"),
    [
        (["calibrat"], "no stage 'calibrat'; did you mean calibrate?"),
        (["bake_cache", "calibrate"], "nothing may follow bake_cache"),
    ],
)
def test_a_recipe_that_cannot_be_leaves_nothing(repository, stages, told):
    before = content(repository)
    with pytest.raises(RecipeError, match=told.replace("?", r"\?")) as caught:
        scaffold.create("new", "tiny", HYPOTHESIS, stages=stages, root=repository)
    assert "\n" not in str(caught.value)
    assert str(repository) not in str(caught.value)
    assert content(repository) == before


def test_a_stage_that_needs_the_checkpoint_says_how_to_get_it(repository):
    with pytest.raises(MissingCheckpointError, match="make download VARIANT=large"):
        scaffold.create("new", "large", HYPOTHESIS, stages=["prune_vocab"], root=repository)
    assert not (repository / "experiments" / "new").exists()


def test_weights_that_no_recipe_made_are_not_taken_for_the_new_variants(repository):
    (repository / "weights" / "new").mkdir()
    with pytest.raises(ScaffoldError, match="weights/new is there already"):
        scaffold.create("new", "tiny", HYPOTHESIS, stages=["calibrate"], root=repository)


def test_a_folder_that_appears_meanwhile_is_not_overwritten(repository, monkeypatch):
    other = repository / "experiments" / "new"
    check = store.validate

    def meanwhile(*arguments):
        other.mkdir()
        (other / "config.env").write_text("VLLM_MODEL=weights/other\n")
        return check(*arguments)

    monkeypatch.setattr(store, "validate", meanwhile)
    with pytest.raises(ScaffoldError, match="created meanwhile"):
        scaffold.create("new", "tiny", HYPOTHESIS, root=repository)
    assert [file.name for file in other.iterdir()] == ["config.env"]
    assert list((repository / ".cache").iterdir()) == []


def test_what_an_interrupted_run_leaves_is_no_variant(repository, monkeypatch):
    monkeypatch.setattr(scaffold.shutil, "rmtree", lambda *_, **__: None)
    monkeypatch.setattr(scaffold, "_readme", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        scaffold.create("new", "tiny", HYPOTHESIS, root=repository)
    assert "new" not in variant.names(repository)
    assert json.dumps([str(problem) for problem in collection.collect(repository).problems]) == "[]"
