import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from slimqwen.bench.latency import speedups
from slimqwen.bench.latency.speedups import LATENCY_MEASURES
from slimqwen.bench.latency.tables import comparison, give_verdict
from slimqwen.records import store
from slimqwen.records.pairing import NotComparableError
from slimqwen.stats import multiplicity
from tests import record_files

DATA = Path(__file__).parents[2] / "records" / "data"


@pytest.fixture
def write(tmp_path, stamps):
    """Write a variant's record; each record is a day newer than the one before."""

    def latency(variant, scale=1.0, change=lambda body: None, jitter=0.1, rounds=1, **fields):
        body = json.loads((DATA / "latency.json").read_text())
        body |= {"variant": variant, "rounds": rounds, **fields}
        change(body)
        items = [
            {
                "class": name,
                "round": number,
                "error": None,
                "output_tokens": 16,
                **dict.fromkeys(LATENCY_MEASURES, scale * (100 + jitter * n + number)),
            }
            for name in body["classes"]
            for number in range(rounds)
            for n in range(12)
        ]
        return record_files.write(tmp_path / variant, body, items)

    latency.folders = (tmp_path / "a", tmp_path / "b")
    return latency


def test_a_speedup_says_how_many_times_as_fast_the_second_is(write):
    rows = speedups.compare_latency(write("a"), write("b", scale=0.5))
    assert [row.measure for row in rows] == list(LATENCY_MEASURES)
    for row in rows:
        assert row.speedup == pytest.approx(2)
        assert row.interval[0] <= 2 <= row.interval[1]
        assert row.interval[1] - row.interval[0] < 0.1


def overlapping(durations_s):
    """Requests that overlap, in rounds of so many seconds, with a limit that all of 100 ms meet."""

    def change(body):
        goodput = {"ttft_ms": 150, "tpot_ms": 150, "good_count": 1, "requests_per_s": 1.0}
        body["classes"]["short"] |= {"concurrency": None, "durations_s": durations_s, "goodput": goodput}

    return change


def test_rates_of_requests_that_overlap_have_an_interval_only_over_rounds(write):
    rows = speedups.compare_latency(
        write("a", change=overlapping([4.0])),
        write("b", change=overlapping([2.0])),
    )
    tokens, good = rows[3:]
    # 12 requests of 16 tokens in 4 s and in 2 s.
    assert (tokens.measure, tokens.first, tokens.second) == ("output_throughput_tokens_per_s", 48, 96)
    assert (good.measure, good.first, good.second) == ("goodput_per_s", 3, 6)
    assert (tokens.speedup, good.speedup) == (2, 2)
    assert tokens.interval is None
    assert {row.rounds for row in rows[:3]} == {0}


def test_several_rounds_are_what_an_interval_is_over(write):
    durations = [4.0, 4.0, 4.0, 4.0, 8.0]
    rows = speedups.compare_latency(
        write("a", change=overlapping(durations), rounds=5, jitter=0),
        write("b", 0.5, change=overlapping([d / 2 for d in durations]), rounds=5, jitter=0),
    )
    assert {row.rounds for row in rows} == {5}
    for row in rows:
        # Both sides of a round are slow together: its ratio is 2 in every one.
        assert row.speedup == pytest.approx(2)
        assert row.interval == pytest.approx((2, 2))


def without_round(path, number):
    """The record with a round in which no request succeeded."""
    items = [item | {"error": "died"} if item["round"] == number else item for item in store.read_items(path)]
    return record_files.write(path.parent, store.read_record(path), items)


def test_a_round_in_which_nothing_succeeded_leaves_the_others_paired(write):
    """Else the second round of the one would stand beside the third of the other."""
    a, b = without_round(write("a", rounds=3, jitter=0), 1), write("b", 0.5, rounds=3, jitter=0)
    rows = speedups.compare_latency(a, b)
    assert rows[0].interval == pytest.approx((2, 2))
    assert {row.rounds for row in rows} == {2}


def test_rounds_that_have_no_partner_are_taken_request_by_request(write):
    rows = speedups.compare_latency(
        without_round(write("a", rounds=2), 0), without_round(write("b", 0.5, rounds=2), 1)
    )
    assert {row.rounds for row in rows} == {0}
    assert rows[0].speedup == pytest.approx(2, rel=0.02)


def test_records_of_different_runs_are_not_paired_by_round(write):
    change = overlapping([1.0, 1.0, 1.0, 1.0, 3.0])
    rows = speedups.compare_latency(
        write("a", change=change, rounds=5),
        write("b", change=change, rounds=5, run="2026-02-02T00:00:00Z"),
    )
    # Round by round nothing differs, but these rounds have nothing to do with each other.
    assert rows[3].speedup == pytest.approx(1)
    assert rows[3].interval[0] < 0.6 < 1.6 < rows[3].interval[1]


def of_recipe(key):
    """A change of a record: its checkpoint is of the recipe with this key."""

    def change(body):
        body["provenance"]["checkpoint"] |= {"recipe_key": key * 64, "digest": key * 64}

    return change


def test_each_further_timing_of_a_pair_is_counted_and_said(write):
    def timed(run):
        pair = [
            write(name, scale, run=run, interleaved_with=["a", "b"], change=one_at_a_time, rounds=5)
            for name, scale in (("a", 1.0), ("b", 0.9 if run == "one" else 0.5))
        ]
        return speedups.count_tries(*pair), pair

    assert timed("one")[0] == 1
    tries, pair = timed("two")
    assert tries == 2
    said = "This is timing 2 of this pair, with the same workload, flags and checkpoints: its interval is widened"
    assert any(said in note for note in comparison(*pair).notes)
    assert said in give_verdict(*pair)


def test_the_interval_of_a_further_timing_is_wider(write):
    def shaky(body):
        overlapping([4.0, 4.4, 4.1, 4.7, 4.2])(body)

    def steady(body):
        overlapping([2.0, 2.0, 2.0, 2.0, 2.0])(body)

    found = []
    for run in ("one", "two", "three"):
        sides = (("a", shaky), ("b", steady))
        pair = [
            write(name, run=run, interleaved_with=["a", "b"], rounds=5, change=change)
            for name, change in sides
        ]
        (row,) = (
            row for row in speedups.compare_latency(*pair) if row.measure == "output_throughput_tokens_per_s"
        )
        found.append(row)
    assert len({row.speedup for row in found}) == 1
    ratios = np.log([4.0, 4.4, 4.1, 4.7, 4.2]) - np.log(2.0)
    for number, row in enumerate(found, start=1):
        level = multiplicity.confidence_of_try(number)
        half = stats.t.ppf((1 + level) / 2, 4) * ratios.std(ddof=1) / np.sqrt(5)
        assert np.log(row.interval) == pytest.approx([ratios.mean() - half, ratios.mean() + half])


@pytest.mark.parametrize("part", ["workload", "checkpoint", "flags"])
def test_a_timing_of_something_else_is_no_try_of_this_pair(write, part):
    def other(body):
        if part == "workload":
            body["workload"] = "other"
        elif part == "checkpoint":
            of_recipe("a")(body)
        else:
            body["provenance"]["flags"] = {**body["provenance"]["flags"], "max-num-seqs": 99}

    for change, run in ((other, "one"), (lambda body: None, "two")):
        pair = [write(name, run=run, interleaved_with=["a", "b"], change=change) for name in "ab"]
    assert speedups.count_tries(*pair) == 1


def test_nothing_good_has_no_ratio(write):
    def nothing_good(body):
        overlapping([1.0])(body)
        body["classes"]["short"]["goodput"]["ttft_ms"] = 1

    rows = speedups.compare_latency(write("a", change=nothing_good), write("b", change=nothing_good))
    assert (rows[-1].first, rows[-1].speedup) == (0, None)


def one_at_a_time(body):
    short = body["classes"]["short"] | {"concurrency": 1, "durations_s": [1.2], "request_count": 12}
    body["classes"] = {"short": short, "long": short}


def test_the_speed_on_the_mix_is_the_time_of_all_requests(write):
    rows = speedups.compare_latency(write("a", change=one_at_a_time), write("b", 0.5, change=one_at_a_time))
    every = rows[-1]
    assert (every.prompt_class, every.measure) == (speedups.ALL_CLASSES, "wall_ms")
    assert every.first == pytest.approx(2 * sum(100 + 0.1 * n for n in range(12)))
    assert (every.speedup, every.rounds) == (pytest.approx(2), 0)
    assert every.interval[0] <= 2 <= every.interval[1]
    assert every.interval[1] - every.interval[0] < 0.1


@pytest.mark.parametrize(
    ("part", "changed", "named"),
    [
        (("provenance", "hardware"), {"cpu_model": "Another CPU"}, "hardware"),
        (("provenance", "hardware"), {"cpu_flags": ["sve"]}, "hardware"),
        (("classes", "short"), {"output_tokens": 17}, "lengths"),
        (("classes", "short"), {"arrival": {"process": "Poisson", "rate_per_s": 2.0}}, "arrivals"),
    ],
    ids=["other CPU", "older CPU", "lengths", "arrivals"],
)
def test_latency_of_other_requests_or_machines_is_refused(write, part, changed, named):
    write("a")
    write("b", change=lambda body: body[part[0]][part[1]].update(changed))
    with pytest.raises(NotComparableError, match=named) as error:
        speedups.latency_pair(*write.folders, "classes")
    assert "slimqwen bench latency --variant b --workload classes" in str(error.value)


def test_workloads_are_compared_each_with_its_own_kind(write):
    a, b = write("a"), write("b")
    a_context, b_context = write("a", workload="context"), write("b", workload="context")
    write("b", workload="shapes")
    assert speedups.shared_workloads(*write.folders) == ["classes", "context"]
    assert speedups.latency_pair(*write.folders, "classes") == (a, b)
    assert speedups.latency_pair(*write.folders, "context") == (a_context, b_context)


def test_no_workload_in_common_names_the_command_that_makes_one(write):
    write("a")
    write("b", workload="shapes")
    with pytest.raises(NotComparableError, match=r"workload \(classes and shapes\)"):
        speedups.shared_workloads(*write.folders)
