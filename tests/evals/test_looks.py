import pytest

from slimqwen.evals import quality_comparison
from slimqwen.evals.looks import read_looks
from tests import record_files

TASK = "example_facts"


@pytest.fixture
def score(tmp_path, stamps):
    """Write a quality record of items by name; each record is a day newer than the one before."""

    def write(names, variant="b", value=1.0, **changes):
        body = record_files.example("quality", variant=variant, **changes)
        body["tasks"] = {TASK: body["tasks"][TASK]}
        items = [{"task": TASK, "item": name, "value": value, "weight": 1.0} for name in names]
        return record_files.write(tmp_path / variant, body, items)

    return write


def test_each_larger_set_of_items_is_a_look(score):
    score("ab"), score("abcd"), score("abcd")
    looks = read_looks(score("abcdef"))[TASK]
    assert (looks.count, looks.dropped_since) == (3, None)
    assert [looks.first_look[name] for name in "abcdef"] == [1, 1, 2, 2, 3, 3]
    assert str(looks) == "look 3"


def test_items_of_the_first_look_come_first_whatever_their_hash(score):
    score("yz")
    looks = read_looks(score("abcdefyz"))[TASK]
    assert set(sorted("abcdefyz", key=looks.order)[:2]) == {"y", "z"}


def test_an_item_that_is_edited_or_left_out_begins_a_new_count(score):
    score("ab"), score("abc")
    looks = read_looks(score("abX"))[TASK]
    assert looks.count == 1
    assert looks.dropped_since in str(looks)
    assert read_looks(score("abXY"))[TASK].count == 2


def test_another_suite_checkpoint_or_variant_has_a_count_of_its_own(score):
    other = record_files.example("quality")["provenance"]
    other["checkpoint"] = other["checkpoint"] | {"digest": "f" * 64}
    score("ab", suite="other"), score("ab", provenance=other), score("ab", variant="c")
    assert read_looks(score("abc"))[TASK].count == 1


def test_another_build_of_the_same_recipe_goes_on_counting(score):
    def built(digest):
        provenance = record_files.example("quality")["provenance"]
        return provenance | {
            "checkpoint": provenance["checkpoint"] | {"digest": digest, "recipe_key": "e" * 64}
        }

    score("ab", provenance=built("a" * 64))
    assert read_looks(score("abc", provenance=built("b" * 64)))[TASK].count == 2


def test_a_record_knows_the_looks_before_it_alone(score):
    first = score("ab")
    score("abc")
    assert read_looks(first)[TASK].count == 1


def test_a_comparison_says_which_look_it_is(score):
    score("ab")
    names = [f"i{number}" for number in range(200)]
    pair = score(names, variant="a"), score([*names])
    notes = quality_comparison.comparison_table(*pair).notes
    assert any(note.startswith("facts: look 1; counted anew") for note in notes)
    grown = [*names, "new"]
    table = quality_comparison.comparison_table(score(grown, variant="a"), score(grown))
    assert "facts: look 2; counted anew" in " ".join(table.notes)
