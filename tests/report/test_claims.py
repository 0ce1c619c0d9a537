"""A ratio in prose stands where one joint measurement gives it, and nowhere else."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest

from slimqwen.evaluation import comparison
from slimqwen.records import store
from slimqwen.records.collection import Collection, Found
from slimqwen.report import claims
from slimqwen.report.claims import Ratio
from tests.records.conftest import example

FAST = Ratio(1.254, "time", "b", ("experiments/a/latency_1.json", "experiments/b/latency_1.json"))
SLOW = Ratio(1 / 1.254, "time", "a", FAST.sources)
SMALL = Ratio(1.21, "size", "b", ("experiments/a/quality_1.json", "experiments/b/quality_1.json"))
STARTS = Ratio(2.47, "time", "b", ("results/start_up_b.json",))
RATIOS = [FAST, SLOW, SMALL, STARTS]


def verdicts(text, owner="b", ratios=RATIOS):
    return [claims.refute(claim, ratios, owner) for claim in claims.find(text)]


@pytest.mark.parametrize(
    "text",
    [
        "1.25x faster.",
        "It is 1.25 times as fast as a.",
        "b answers 1.3x faster than a.",
        "Requests take 1.25\N{MULTIPLICATION SIGN} less time.",
        "It is 25 % faster.",
        "Requests are 20 % faster.",
        "a is 1.25x slower than b.",
        "Against a, b is 1.25x as fast.",
        "Baked starts are 2.47x faster.",
        "Starts are two times as fast.",
        "On disk it is 1.21x smaller.",
        "A 17 % smaller checkpoint on disk.",
        "Figures: 1.254x.",
        "```\nTTFT of a and b: 0.80x 1.00 to 1.06 and 1.25x\n```",
    ],
)
def test_what_one_measurement_gives_stands(text):
    found = verdicts(text)
    assert found
    assert set(found) <= ({None} if "20 %" not in text else {None, found[0]})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1.26x faster.", "'1.26x faster.' is what no single measurement gives"),
        ("It is twice as fast.", "'twice as fast.'"),
        ("b is 1.25x slower than a.", "'1.25x slower than'"),
        ("a is 1.25x faster than b.", "no single measurement"),
        ("On disk it is 1.25x smaller.", "no single measurement"),
        ("It is 40 % faster.", "'40 % faster.'"),
        ("Ten times faster.", "'Ten times faster.'"),
        ("A 3-fold gain.", "'3-fold gain.'"),
        ("Starts and requests together are 3.10x faster.", "a product of two: 1.25 (experiments/a/latency_1.json"),
        ("Speed and size: 1.52x.", "a product of two: 1.21"),
    ],
)  # fmt: skip
def test_what_no_measurement_gives_is_refuted(text, said):
    (verdict,) = verdicts(text)
    assert said in verdict


@pytest.mark.parametrize(
    "text",
    [
        "A 248,320 x 2,560 matrix, graphs at (K+1) x {1..8}, 0x1f, 4x4.",
        "Limits are three times the noise; half the vocabulary is gone, two times is enough.",
        "Theirs is 9.99x faster (reference: their paper).",
        "**Hypothesis.** Four draft tokens are 3.5x faster\non mixed prompts.",
        "<!-- table:comparison a b -->\n| 9.99x |\n<!-- end -->",
        "97 % of its acceptance length, version 1.2.3x",
    ],
)
def test_what_is_no_claim_of_ours_is_left_alone(text):
    assert claims.find(text) == []


def test_a_claim_names_its_line_and_a_mark_covers_its_sentence_alone():
    found = claims.find(
        "# b\n\nText.\n\nThey had 3x (reference). We have 4x.\n<!-- table:x -->\n5x\n<!-- end -->\n6x"
    )
    assert [(claim.words, claim.line) for claim in found] == [("4x.", 5), ("6x", 9)]


def test_the_repository_s_readme_may_claim_of_a_variant_that_its_section_names():
    assert verdicts("# All\n\n## b\n\nNow 1.25x faster.", owner=None) == [None]
    assert verdicts("# All\n\n## c\n\nNow 1.25x faster.", owner=None) != [None]
    assert verdicts("# All\n\nNow 1.25x faster (experiments/b/latency_1.json).", owner="c") == [None]


def found(kind, name, record, stamp="1"):
    place = f"experiments/{name}/{kind}_{stamp}.json"
    return Found(Path(place), place, kind, name, record | {"variant": name})


def collected(*records):
    claims_of = {
        name: {"baseline": baseline, "records": []}
        for name, baseline in (("a", None), ("b", "a"), ("c", "a"))
    }
    return Collection(None, records, claims_of, ())


def latency(name, factor, run="r"):
    record = copy.deepcopy(example("latency")) | {"run": run}
    for row in record["classes"].values():
        for measure in ("ttft_ms", "tpot_ms", "e2el_ms"):
            row[measure] = {key: value * factor for key, value in row[measure].items()}
    return found("latency", name, record)


def test_two_runs_in_turns_give_a_speed_up_both_ways_and_two_apart_give_none():
    together = claims.measured(collected(latency("a", 2), latency("b", 1)))
    gains = {(ratio.variant, round(ratio.gain, 3)) for ratio in together if ratio.sort == "time"}
    assert {("b", 2.0), ("a", 0.5)} <= gains
    apart = claims.measured(collected(latency("a", 2, "monday"), latency("b", 1, "tuesday")))
    assert [ratio for ratio in apart if ratio.sort == "time"] == []


def test_the_speed_up_that_a_comparison_prints_is_one(tmp_path):
    """Over rounds it is no ratio of two medians."""
    rounds = {"a": ([100.0] * 3 + [400.0], [100.0] * 4), "b": ([100.0] * 4, [50.0] * 4)}
    sides = []
    for name, times in rounds.items():
        one = latency(name, 1)
        items = [
            {"class": "short", "round": number, "error": None, "ttft_ms": ms, "tpot_ms": ms, "e2el_ms": ms}
            for number, of_round in enumerate(times)
            for ms in of_round
        ]
        path = store.write(tmp_path / name, one.record | {"rounds": 2}, items)
        sides.append(replace(one, path=path, record=store.read(path)))
    printed = {row.speedup for row in comparison.compare_latency(*(one.path for one in sides))}
    gains = {ratio.gain for ratio in claims.measured(collected(*sides)) if ratio.variant == "b"}
    assert printed <= gains
    assert min(printed) == pytest.approx(2**0.5)


def test_levers_that_were_measured_apart_do_not_multiply():
    # Each against the baseline in a run of its own; nobody ran both.
    ratios = claims.measured(
        collected(
            latency("a", 1.5, "monday"), latency("b", 1, "monday"),
            latency("a", 1.2, "tuesday"), latency("c", 1, "tuesday"),
        )
    )  # fmt: skip
    stands, product = (claims.find(f"b and c: {figure}x faster.")[0] for figure in ("1.50", "1.80"))
    assert claims.refute(stands, ratios, "b") is None
    assert "no single measurement" in claims.refute(product, ratios, "b")


def test_sizes_are_those_of_the_checkpoints_measured_last():
    def sized(name, size, stamp):
        record = copy.deepcopy(example("quality"))
        record["provenance"]["checkpoint"]["size_bytes"] = size
        record["provenance"]["ended"] = f"2026-01-0{stamp}T00:00:00Z"
        return found("quality", name, record, stamp)

    ratios = claims.measured(collected(sized("a", 800, 1), sized("b", 800, 1), sized("b", 200, 2)))
    assert {(ratio.variant, ratio.gain) for ratio in ratios} == {("b", 4.0), ("a", 0.25)}
