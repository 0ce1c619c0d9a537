import json
import math
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

    def latency(variant, scale=1.0, change=lambda body: None, jitter=0.1, rounds=1):
        body = json.loads((DATA / "latency.json").read_text()) | {"variant": variant, "rounds": rounds}
        change(body)
        items = [
            {
                "class": name,
                "round": number,
                "error": None,
                "output_tokens": 16,
                **dict.fromkeys(comparison.LATENCY_MEASURES, scale * (100 + jitter * n + number)),
            }
            for name in body["classes"]
            for number in range(rounds)
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


def test_of_scores_on_as_many_items_those_of_one_kind_of_machine_are_paired(write):
    known = json.loads((DATA / "quality.json").read_text())["provenance"]
    other = known | {"hardware": known["hardware"] | {"cpu_flags": ["avx2", "avx512f"]}}
    first, newer = write("a", provenance=other), write("a")
    assert comparison.quality_pair(*write.folders[:1], write("b", provenance=other).parent)[0] == first
    assert comparison.quality_pair(*write.folders[:1], write("c").parent)[0] == newer
    third = known | {"hardware": known["hardware"] | {"cpu_flags": ["sse2"]}}
    assert comparison.quality_pair(*write.folders[:1], write("d", provenance=third).parent)[0] == newer


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


def test_records_made_in_turns_are_taken_before_newer_ones_that_were_not(write):
    def run(name):
        return lambda body: body.update(run=name)

    pair = write.latency("a", change=run("one")), write.latency("b", change=run("one"))
    write.latency("a", change=run("two"))
    assert comparison.latency_pair(*write.folders, "classes") == pair


def test_all_items_are_taken_before_a_sample_but_not_of_a_checkpoint_that_is_gone(write):
    full = write("a", limit=None), write("b", limit=None)
    for name, items in zip(("a", "b"), full, strict=True):
        record = json.loads(items.read_text())
        for row in record["tasks"].values():
            row["item_count"] *= 10
        items.write_text(json.dumps(record))
        write(name)
    assert comparison.quality_pair(*write.folders) == full
    provenance = json.loads((DATA / "quality.json").read_text())["provenance"]
    provenance["checkpoint"]["digest"] = "ef" * 32
    anew = write("b", provenance=provenance)
    assert comparison.quality_pair(*write.folders)[1] == anew


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
    rows = comparison.compare_latency(
        write.latency("a", change=overlapping([4.0])),
        write.latency("b", change=overlapping([2.0])),
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
    rows = comparison.compare_latency(
        write.latency("a", change=overlapping(durations), rounds=5, jitter=0),
        write.latency("b", 0.5, change=overlapping([d / 2 for d in durations]), rounds=5, jitter=0),
    )
    assert {row.rounds for row in rows} == {5}
    for row in rows:
        # Both sides of a round are slow together: its ratio is 2 in every one.
        assert row.speedup == pytest.approx(2)
        assert row.interval == pytest.approx((2, 2))


def test_rounds_that_disagree_widen_the_interval(write):
    def slower_at_last(body):
        overlapping([1.0] * 5)(body)

    apart = (
        write.latency("a", change=slower_at_last, rounds=5),
        write.latency("b", change=overlapping([1.0, 1.0, 1.0, 1.0, 3.0]), rounds=5),
    )
    tokens = comparison.compare_latency(*apart)[3]
    assert tokens.speedup == pytest.approx(3 ** (-1 / 5))
    # Student's t with 4 degrees of freedom: one round of five a third as fast is compatible with no change.
    reach = 2.7764451 * math.log(3) / 5
    assert tokens.interval == pytest.approx(
        (3 ** (-1 / 5) / math.exp(reach), 3 ** (-1 / 5) * math.exp(reach))
    )


def test_a_round_in_which_nothing_succeeded_leaves_the_others_paired(write):
    """Else the second round of the one would stand beside the third of the other."""
    path = write.latency("a", rounds=3, jitter=0)
    items = [item | {"error": "died"} if item["round"] == 1 else item for item in store.read_items(path)]
    a = store.write(path.parent, store.read(path), items)
    rows = comparison.compare_latency(a, write.latency("b", 0.5, rounds=3, jitter=0))
    assert rows[0].interval == pytest.approx((2, 2))
    assert {row.rounds for row in rows} == {2}


def test_rounds_that_have_no_partner_are_taken_request_by_request(write):
    def without(path, number):
        items = [i | {"error": "died"} if i["round"] == number else i for i in store.read_items(path)]
        return store.write(path.parent, store.read(path), items)

    rows = comparison.compare_latency(
        without(write.latency("a", rounds=2), 0), without(write.latency("b", 0.5, rounds=2), 1)
    )
    assert {row.rounds for row in rows} == {0}
    assert rows[0].speedup == pytest.approx(2, rel=0.02)


def test_machines_of_one_name_with_other_instructions_are_not_compared(write):
    def older(body):
        body["provenance"]["hardware"]["cpu_flags"] = ["sve"]

    with pytest.raises(comparison.NotComparableError, match="hardware"):
        comparison.compare_latency(write.latency("a"), write.latency("b", change=older))


def test_records_of_different_runs_are_not_paired_by_round(write):
    durations = [1.0, 1.0, 1.0, 1.0, 3.0]

    def another_run(body):
        overlapping(durations)(body)
        body["run"] = "2026-02-02T00:00:00Z"

    rows = comparison.compare_latency(
        write.latency("a", change=overlapping(durations), rounds=5),
        write.latency("b", change=another_run, rounds=5),
    )
    # Round by round nothing differs, but these rounds have nothing to do with each other.
    assert rows[3].speedup == pytest.approx(1)
    assert rows[3].interval[0] < 0.6 < 1.6 < rows[3].interval[1]


def test_nothing_good_has_no_ratio(write):
    def nothing_good(body):
        overlapping([1.0])(body)
        body["classes"]["short"]["goodput"]["ttft_ms"] = 1

    rows = comparison.compare_latency(
        write.latency("a", change=nothing_good), write.latency("b", change=nothing_good)
    )
    assert (rows[-1].first, rows[-1].speedup) == (0, None)


def one_at_a_time(body):
    short = body["classes"]["short"] | {"concurrency": 1, "durations_s": [1.2], "request_count": 12}
    body["classes"] = {"short": short, "long": short}


def test_the_speed_on_the_mix_is_the_time_of_all_requests(write):
    rows = comparison.compare_latency(
        write.latency("a", change=one_at_a_time), write.latency("b", 0.5, change=one_at_a_time)
    )
    every = rows[-1]
    assert (every.prompt_class, every.measure) == (comparison.ALL_CLASSES, "wall_ms")
    assert every.first == pytest.approx(2 * sum(100 + 0.1 * n for n in range(12)))
    assert every.speedup == pytest.approx(2)
    assert every.interval[0] <= 2 <= every.interval[1]
    assert every.interval[1] - every.interval[0] < 0.1


def other_machine(body):
    body["provenance"]["hardware"]["cpu_model"] = "Another CPU"


def other_lengths(body):
    body["classes"]["short"]["output_tokens"] = 17


def other_arrivals(body):
    body["classes"]["short"]["arrival"] = {"process": "Poisson", "rate_per_s": 2.0}


@pytest.mark.parametrize(
    ("change", "named"),
    [(other_machine, "hardware"), (other_lengths, "lengths"), (other_arrivals, "arrivals")],
)
def test_latency_of_other_requests_or_machines_is_refused(write, change, named):
    write.latency("a")
    write.latency("b", change=change)
    with pytest.raises(comparison.NotComparableError, match=named) as error:
        comparison.latency_pair(*write.folders, "classes")
    assert "python scripts/eval_latency.py --variant b --workload classes" in str(error.value)


def test_workloads_are_compared_each_with_its_own_kind(write):
    def context(body):
        body["workload"] = "context"

    a, b = write.latency("a"), write.latency("b")
    a_context, b_context = write.latency("a", change=context), write.latency("b", change=context)
    write.latency("b", change=lambda body: body.update(workload="shapes"))
    assert comparison.shared_workloads(*write.folders) == ["classes", "context"]
    assert comparison.latency_pair(*write.folders, "classes") == (a, b)
    assert comparison.latency_pair(*write.folders, "context") == (a_context, b_context)


def test_no_workload_in_common_names_the_command_that_makes_one(write):
    write.latency("a")
    write.latency("b", change=lambda body: body.update(workload="shapes"))
    with pytest.raises(comparison.NotComparableError, match=r"workload \(classes and shapes\)"):
        comparison.shared_workloads(*write.folders)


def test_repeats_of_an_item_are_one_observation(tmp_path):
    def write(variant, answers):
        body = json.loads((DATA / "quality.json").read_text()) | {"variant": variant}
        body["tasks"] = {FACTS: body["tasks"][FACTS]}
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
        return store.write(tmp_path / variant, body, items)

    base = write("a", [(1, 1), (0, 0), (1, 1), (1, 1)])
    (row,) = comparison.compare_quality(base, write("b", [(1, 1), (1, 1), (1, 1), (0, 0)]))
    assert row.difference.count == 4
    assert (row.discordance.only_first, row.discordance.only_second) == (1, 1)
    # An item that is right now and then is neither right nor wrong.
    (row,) = comparison.compare_quality(base, write("c", [(1, 0), (1, 1), (1, 1), (0, 0)]))
    assert row.discordance is None
    assert row.difference.value == pytest.approx(-0.125)


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"endpoint": "chat"}, "endpoint"), ({"limit": "deciding"}, "limit")],
)
def test_scores_that_were_asked_for_otherwise_are_refused(write, changes, named):
    with pytest.raises(comparison.NotComparableError, match=named):
        comparison.compare_quality(write("a"), write("b", **changes))
    comparison.compare_quality(write("a", **changes), write("b", **changes))
