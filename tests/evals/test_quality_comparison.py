import json

import pytest

from slimqwen.evals import quality_comparison
from slimqwen.records import pairing, store
from tests import record_files

FACTS = "example_facts"
PROSE = "example_prose"


@pytest.fixture
def write(tmp_path, stamps):
    """Write a variant's record with given item values; each record is a day newer than the one before."""

    def quality(variant, facts=(1, 0, 1, 0), prose=(1.0, 2.0), **changes):
        body = record_files.example("quality", variant=variant, **changes)
        items = [
            {"task": FACTS, "item": f"f{n}", "value": float(v), "weight": 1.0} for n, v in enumerate(facts)
        ]
        items += [
            {"task": PROSE, "item": f"p{n}", "value": v, "weight": w}
            for n, (v, w) in enumerate(zip(prose, (10, 30), strict=True))
        ]
        body["tasks"][FACTS]["value"] = sum(facts) / len(facts)
        return record_files.write(tmp_path / variant, body, items)

    quality.folders = (tmp_path / "a", tmp_path / "b")
    return quality


def provenance(**changes):
    return record_files.example("quality")["provenance"] | changes


def test_scores_are_paired_item_by_item(write):
    rows = quality_comparison.compare_quality(write("a", facts=(1, 0, 1, 1)), write("b", facts=(0, 1, 0, 1)))
    facts, prose = rows
    assert (facts.first, facts.second) == (0.75, 0.5)
    assert facts.difference.value == pytest.approx(-0.25)
    assert (facts.discordance.only_first, facts.discordance.only_second) == (2, 1)
    assert facts.discordance.p_value == pytest.approx(1.0)
    assert prose.discordance is None
    assert prose.sign == -1


def test_a_gain_of_a_measure_of_which_less_is_better_is_a_fall(write):
    _, prose = quality_comparison.compare_quality(write("a"), write("b", prose=(0.9, 2.1)))
    assert prose.gain == pytest.approx(-0.05) == -prose.difference.value


def test_of_scores_on_as_many_items_those_of_one_kind_of_machine_are_paired(write):
    def with_cpu(*flags):
        return provenance(hardware=provenance()["hardware"] | {"cpu_flags": flags})

    first, newer = write("a", provenance=with_cpu("avx2", "avx512f")), write("a")

    def paired_with(name, **changes):
        return quality_comparison.pair_quality_records(first.parent, write(name, **changes).parent)[0]

    assert paired_with("b", provenance=with_cpu("avx2", "avx512f")) == first
    assert paired_with("c") == newer
    assert paired_with("d", provenance=with_cpu("sse2")) == newer


def test_texts_are_weighted_in_the_difference(write):
    rows = quality_comparison.compare_quality(write("a", prose=(1.0, 2.0)), write("b", prose=(1.0, 2.4)))
    assert rows[1].difference.value == pytest.approx(0.4 * 30 / 40)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"limit": 3}, "limit"),
        ({"limit": "auto"}, "limit"),
        ({"suite": "other"}, "suite"),
        ({"facts": (1, 0, 1)}, "items of example_facts"),
        (
            {"provenance": provenance(datasets={"eval/tasks/example.jsonl": "00" * 32})},
            r"eval/tasks/example\.jsonl",
        ),
    ],
)
def test_scores_of_other_items_or_asked_for_otherwise_are_refused(write, changes, named):
    with pytest.raises(pairing.NotComparableError, match=named):
        quality_comparison.compare_quality(write("a"), write("b", **changes))
    quality_comparison.compare_quality(write("a", **changes), write("b", **changes))


def test_the_newest_records_that_fit_are_taken(write):
    a_full, a_sample = write("a", limit=None), write("a")
    b_sample, b_smoke = write("b"), write("b", limit=2)
    assert quality_comparison.pair_quality_records(*write.folders) == (a_sample, b_sample)
    assert b_smoke > b_sample > a_sample > a_full


def test_all_items_are_taken_before_a_sample_but_not_of_a_checkpoint_that_is_gone(write):
    full = write("a", limit=None), write("b", limit=None)
    for name, items in zip(("a", "b"), full, strict=True):
        record = json.loads(items.read_text())
        for row in record["tasks"].values():
            row["item_count"] *= 10
        items.write_text(json.dumps(record))
        write(name)
    assert quality_comparison.pair_quality_records(*write.folders) == full
    other_checkpoint = provenance()["checkpoint"] | {"digest": "ef" * 32}
    anew = write("b", provenance=provenance(checkpoint=other_checkpoint))
    assert quality_comparison.pair_quality_records(*write.folders)[1] == anew


def test_records_that_do_not_fit_name_the_command_that_makes_one(write):
    write("a", limit=150)
    write("b", limit=None)
    with pytest.raises(pairing.NotComparableError, match=r"limit \(150 and all items\)") as error:
        quality_comparison.pair_quality_records(*write.folders)
    assert "`slimqwen eval quality --variant b --suite example --limit 150`" in str(error.value)


def test_a_variant_that_was_never_measured_is_named(write):
    write("a")
    with pytest.raises(store.MissingRecordError, match="slimqwen eval quality --variant b"):
        quality_comparison.pair_quality_records(*write.folders)


def test_repeats_of_an_item_are_one_observation(tmp_path):
    def write(variant, answers):
        task = {FACTS: record_files.example("quality")["tasks"][FACTS]}
        items = [
            {
                "task": FACTS,
                "item": f"f{n}",
                "cluster": f"f{n}",
                "repeat": r,
                "value": float(v),
                "weight": 1.0,
            }
            for n, repeats in enumerate(answers)
            for r, v in enumerate(repeats)
        ]
        body = record_files.example("quality", variant=variant, tasks=task)
        return record_files.write(tmp_path / variant, body, items)

    base = write("a", [(1, 1), (0, 0), (1, 1), (1, 1)])
    (row,) = quality_comparison.compare_quality(base, write("b", [(1, 1), (1, 1), (1, 1), (0, 0)]))
    assert row.difference.count == 4
    assert (row.discordance.only_first, row.discordance.only_second) == (1, 1)
    # An item that is right now and then is neither right nor wrong.
    (row,) = quality_comparison.compare_quality(base, write("c", [(1, 0), (1, 1), (1, 1), (0, 0)]))
    assert row.discordance is None
    assert row.difference.value == pytest.approx(-0.125)


def test_a_table_has_both_scores_the_verdict_and_the_sizes_on_disk(write):
    half = provenance()["checkpoint"] | {"size_bytes": 4_000_000}
    first = write("a", facts=(1, 0, 1, 1))
    second = write("b", facts=(0, 1, 0, 1), prose=(1.0, 2.4), provenance=provenance(checkpoint=half))
    shown = quality_comparison.comparison_table(first, second)
    assert shown.title == "Quality: a and b, paired by item"
    assert shown.columns[2:4] == ("a", "b")
    facts, prose = shown.rows
    assert facts[:4] == ("facts", "exact match", "0.750", "0.500")
    assert facts[4].startswith("-0.250 ± ")
    assert facts[6:9] == ("1.000", "0.04", "inconclusive")
    assert facts[9] == "4"
    assert prose[:2] == ("prose", "bits per byte")
    assert prose[4].startswith("+0.300 ± ")
    assert prose[6] == "-"
    assert shown.notes[0] == "Checkpoints on disk: 8.0 MB and 4.0 MB, 2.00x."
    same = quality_comparison.comparison_table(first, first)
    assert same.columns[2:4] == ("a", "a again")
    assert same.rows[0][9] == "4"  # the example's suite plans no number of items
