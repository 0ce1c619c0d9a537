import json
from pathlib import Path

import pytest

from slimqwen.evaluation import comparison
from slimqwen.records import store

DATA = Path(__file__).parent.parent / "records" / "data"
FACTS = "example_facts"
PROSE = "example_prose"


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a variant's record with given item values; each record is a day newer than the one before."""
    days = iter(range(1, 29))
    monkeypatch.setattr(store, "_stamp", lambda: f"2026-01-{next(days):02}T000000Z")

    def quality(variant, facts=(1, 0, 1, 0), prose=(1.0, 2.0), **changes):
        body = json.loads((DATA / "quality.json").read_text()) | {"variant": variant} | changes
        items = [
            {"task": FACTS, "item": f"f{n}", "value": float(v), "weight": 1.0} for n, v in enumerate(facts)
        ]
        items += [
            {"task": PROSE, "item": f"p{n}", "value": v, "weight": w}
            for n, (v, w) in enumerate(zip(prose, (10, 30), strict=True))
        ]
        body["tasks"][FACTS]["value"] = sum(facts) / len(facts)
        return store.write(tmp_path / variant, body, items)

    def latency(variant, scale=1.0, change=lambda body: None, jitter=0.1):
        body = json.loads((DATA / "latency.json").read_text()) | {"variant": variant}
        change(body)
        items = [
            {
                "class": "short",
                "error": None,
                **dict.fromkeys(comparison.LATENCY_MEASURES, scale * (100 + jitter * n)),
            }
            for n in range(12)
        ]
        return store.write(tmp_path / variant, body, items)

    quality.latency = latency
    quality.folders = (tmp_path / "a", tmp_path / "b")
    return quality


def test_scores_are_paired_item_by_item(write):
    rows = comparison.compare_quality(write("a", facts=(1, 0, 1, 1)), write("b", facts=(0, 1, 0, 1)))
    facts, prose = rows
    assert (facts.first, facts.second) == (0.75, 0.5)
    assert facts.difference.value == pytest.approx(-0.25)
    assert (facts.discordance.only_first, facts.discordance.only_second) == (2, 1)
    assert facts.discordance.p_value == pytest.approx(1.0)
    assert prose.discordance is None
    assert prose.higher_is_better is False


def test_texts_are_weighted_in_the_difference(write):
    rows = comparison.compare_quality(write("a", prose=(1.0, 2.0)), write("b", prose=(1.0, 2.4)))
    assert rows[1].difference.value == pytest.approx(0.4 * 30 / 40)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"limit": 3}, "limit"),
        ({"suite": "other"}, "suite"),
        ({"facts": (1, 0, 1)}, "items of example_facts"),
    ],
)
def test_scores_of_other_items_are_refused(write, changes, named):
    with pytest.raises(comparison.NotComparableError, match=named):
        comparison.compare_quality(write("a"), write("b", **changes))


def test_other_data_files_are_refused_by_name(write):
    provenance = json.loads((DATA / "quality.json").read_text())["provenance"]
    provenance["datasets"] = {"eval/tasks/example.jsonl": "00" * 32}
    with pytest.raises(comparison.NotComparableError, match=r"eval/tasks/example\.jsonl"):
        comparison.compare_quality(write("a"), write("b", provenance=provenance))


def test_the_newest_records_that_fit_are_taken(write):
    a_full, a_sample = write("a", limit=None), write("a")
    b_sample, b_smoke = write("b"), write("b", limit=2)
    assert comparison.quality_pair(*write.folders) == (a_sample, b_sample)
    assert b_smoke > b_sample > a_sample > a_full


def test_records_that_do_not_fit_name_the_command_that_makes_one(write):
    write("a", limit=150)
    write("b", limit=None)
    with pytest.raises(comparison.NotComparableError, match=r"limit \(150 and all items\)") as error:
        comparison.quality_pair(*write.folders)
    assert "`python scripts/eval_quality.py --variant b --suite example --limit 150`" in str(error.value)


def test_a_variant_that_was_never_measured_is_named(write):
    write("a")
    with pytest.raises(store.MissingRecordError, match="make eval-quality VARIANT=b"):
        comparison.quality_pair(*write.folders)


def test_a_speedup_says_how_many_times_as_fast_the_second_is(write):
    rows = comparison.compare_latency(write.latency("a"), write.latency("b", scale=0.5))
    assert [row.measure for row in rows] == list(comparison.LATENCY_MEASURES)
    for row in rows:
        assert row.speedup.value == pytest.approx(2)
        assert row.speedup.low <= 2 <= row.speedup.high
        assert row.speedup.high - row.speedup.low < 0.1


def other_machine(body):
    body["provenance"]["hardware"]["cpu_model"] = "Another CPU"


def other_lengths(body):
    body["classes"]["short"]["output_tokens"] = 17


@pytest.mark.parametrize(("change", "named"), [(other_machine, "hardware"), (other_lengths, "lengths")])
def test_latency_of_other_requests_or_machines_is_refused(write, change, named):
    write.latency("a")
    write.latency("b", change=change)
    with pytest.raises(comparison.NotComparableError, match=named) as error:
        comparison.latency_pair(*write.folders)
    assert "python scripts/eval_latency.py --variant b --workload classes" in str(error.value)
