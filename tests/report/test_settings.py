"""`compare --settings`: what two variants differ in."""

from slimqwen import variant
from slimqwen.report.settings import settings_table


def rows(first: str, second: str) -> dict[str, tuple[str, ...]]:
    return {row[0]: row[1:] for row in settings_table(variant.load(first), variant.load(second)).rows}


def test_lines_stages_and_parameters_that_differ_are_named_with_both_values():
    found = rows("tiny-awq", "tiny-best")
    assert found["VLLM_MODEL"] == ("weights/tiny-awq", "weights/tiny-best")
    assert found["redistill_mtp"][0] == "-"
    assert found["redistill_mtp"][1].startswith("stage ")
    assert all(before != after for before, after in found.values())


def test_a_baseline_without_recipe_lacks_every_stage():
    found = rows("tiny", "tiny-awq")
    assert found["calibrate"] == ("-", "stage 1")
    assert found["recipe: base"] == ("-", "tiny")


def test_a_variant_beside_itself_differs_in_nothing_and_the_table_says_so():
    table = settings_table(variant.load("tiny-best"), variant.load("tiny-best"))
    assert table.rows == ()
    assert table.notes[0].startswith("All ")


def test_a_parameter_that_was_changed_is_one_row(tmp_path):
    text = (variant.load("tiny-awq").recipe or tmp_path).read_text()
    for name, recipe in (("a", text), ("b", text.replace("seed: 0", "seed: 7"))):
        folder = tmp_path / "experiments" / name
        folder.mkdir(parents=True)
        (folder / "config.env").write_text("VLLM_MODEL=weights/x\n")
        (folder / "measurements.json").write_text('{"hypothesis": "x", "baseline": null}')
        (folder / "recipe.yaml").write_text(recipe)
    sides = [variant.load(name, tmp_path) for name in ("a", "b")]
    assert settings_table(*sides).rows == (("calibrate: corpus.seed", "0", "7"),)
