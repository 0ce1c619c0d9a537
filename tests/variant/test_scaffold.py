"""A new variant appears whole, passes what every variant has to pass, and a mistake leaves nothing behind."""

import json
from pathlib import Path

import pytest

from slimqwen import variant
from slimqwen.records import collection, store
from slimqwen.report import markdown
from slimqwen.serving import flags
from slimqwen.variant import scaffold
from slimqwen.variant.scaffold import ScaffoldError

ROOT = Path(__file__).parents[2]
HYPOTHESIS = "It loses nothing."
RECIPE = "description: One stage.\nbase: tiny\nstages:\n  - quantise_lm_head:\n"


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
    assert store.read_measurements(folder).status == "planned"
    assert f"**Hypothesis.** {HYPOTHESIS}" in (folder / "README.md").read_text()
    # The list of variants (all, as this is no checkout), and the page's own tables, which name what makes records.
    assert markdown.update_tables(repository) == [repository / "README.md", folder / "README.md"]
    assert (folder / "README.md").read_text().count("; run `slimqwen ") == 2


def test_the_base_of_a_baseline_is_the_baseline(repository):
    scaffold.create("new", "tiny", HYPOTHESIS, root=repository)
    assert variant.load("new", repository).baseline == "tiny"


def test_a_variant_with_a_recipe_has_weights_of_its_own(repository):
    scaffold.create("new", "tiny-seq8", HYPOTHESIS, recipe=RECIPE, root=repository)
    made = variant.load("new", repository)
    assert made.recipe.read_text() == RECIPE
    assert made.weights == repository / "weights" / "new"
    assert variant.making_command(made.weights, repository) == "`slimqwen recipe run new` makes it"


def test_a_baseline_has_its_own_lines_and_nothing_to_be_compared_with(repository):
    lines = {"VLLM_MODEL": "weights/tiny", "VLLM_MAX_NUM_SEQS": "2"}
    folder = scaffold.create("new", None, HYPOTHESIS, lines=lines, root=repository)
    made = variant.load("new", repository)
    assert (made.lineage, made.baseline, made.recipe) == (("new",), None, None)
    assert {key: setting.value for key, setting in made.settings.items()} == lines
    readme = (folder / "README.md").read_text()
    assert "The baseline of its variants" in readme
    assert "slimqwen gate" not in readme
    assert collection.collect(repository).problems == ()


def test_the_new_variant_passes_what_is_checked_of_all(repository):
    scaffold.create("new", "tiny", HYPOTHESIS, recipe=RECIPE, root=repository)
    result = collection.collect(repository)
    assert result.problems == ()
    assert result.measurements["new"].hypothesis == HYPOTHESIS
    markdown.update_tables(repository)
    assert f"| new | {HYPOTHESIS} | tiny | planned |" in (repository / "README.md").read_text()
    assert flags.resolve(variant.load("new", repository))


def refuse(repository, kind, message, name="new", base="tiny", hypothesis=HYPOTHESIS, **options):
    before = content(repository)
    with pytest.raises(kind, match=message):
        scaffold.create(name, base, hypothesis, root=repository, **options)
    assert content(repository) == before


@pytest.mark.parametrize(
    "name", ["", ".hidden", "../out", "a/b", "-x", "with space", "ü", "x" * 65, "store", "new\n"]
)
def test_a_bad_name_is_refused(repository, name):
    refuse(repository, ScaffoldError, "cannot name a variant", name=name)


@pytest.mark.parametrize("hypothesis", ["", " \n\t", "<!-- table:results tiny -->"])
def test_a_hypothesis_that_is_none_is_refused(repository, hypothesis):
    refuse(repository, ScaffoldError, "has no hypothesis", hypothesis=hypothesis)


def test_weights_that_no_recipe_made_are_not_taken_for_the_new_variants(repository):
    (repository / "weights" / "new").mkdir()
    refuse(repository, ScaffoldError, "weights/new exists", recipe=RECIPE)


def test_a_folder_that_appears_meanwhile_is_not_overwritten(repository, monkeypatch):
    other = repository / "experiments" / "new"
    check = scaffold.flush

    def meanwhile(*arguments):
        other.mkdir(exist_ok=True)
        (other / "config.env").write_text("VLLM_MODEL=weights/other\n")
        return check(*arguments)

    monkeypatch.setattr(scaffold, "flush", meanwhile)
    with pytest.raises(ScaffoldError, match="created meanwhile"):
        scaffold.create("new", "tiny", HYPOTHESIS, root=repository)
    assert [file.name for file in other.iterdir()] == ["config.env"]
    assert list((repository / ".cache").iterdir()) == []


def test_what_an_interrupted_run_leaves_is_no_variant(repository, monkeypatch):
    monkeypatch.setattr(scaffold.shutil, "rmtree", lambda *_, **__: None)
    monkeypatch.setattr(scaffold, "flush", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        scaffold.create("new", "tiny", HYPOTHESIS, root=repository)
    assert "new" not in variant.names(repository)
    assert json.dumps([str(problem) for problem in collection.collect(repository).problems]) == "[]"


def test_a_copy_has_the_lines_and_the_recipe_with_its_texts_and_a_checkpoint_of_its_own(
    repository, add_variant
):
    config = add_variant(
        "old", "# why\nBASE=tiny\nVLLM_MODEL=weights/old\nVLLM_MAX_NUM_SEQS=8\n", baseline="tiny"
    )
    texts = "corpus: mix.jsonl\nstages:\n  - calibrate: {corpus: {path: ../../eval/texts/tinyworld.jsonl}} # as is\n"
    texts += '  - sample_outputs:\n      corpus:\n        path: "../other/a b.txt"\n        seed: 1\n'
    (config.parent / "recipe.yaml").write_text(f"description: x\nbase: tiny\n{texts}")
    folder = scaffold.copy("new", "old", root=repository)
    made = variant.load("new", repository)
    assert (made.weights, made.baseline) == (repository / "weights" / "new", "tiny")
    assert made.hypothesis == variant.load("old", repository).hypothesis
    assert (folder / "config.env").read_text() == config.read_text().replace("weights/old", "weights/new")
    moved = texts.replace("mix.jsonl", "../old/mix.jsonl").replace(
        "../../eval/texts/tinyworld.jsonl", "tinyworld"
    )
    assert (folder / "recipe.yaml").read_text() == f"description: x\nbase: tiny\n{moved}"


def test_a_copy_of_a_baseline_is_compared_with_it_and_is_no_copy_of_the_hub(repository):
    scaffold.copy("new", "large", root=repository)
    made = variant.load("new", repository)
    assert (made.baseline, "SOURCE" in made.settings) == ("large", False)
    assert made.weights == repository / "weights" / "large"
