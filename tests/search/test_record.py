"""The record of a search: its front, its advice, and what its tables and panels show."""

from pathlib import Path
from typing import Any

import pytest

from slimqwen import variant
from slimqwen.records import provenance
from slimqwen.records.record import Difference, Estimate, Finding, Verdict
from slimqwen.report import charts
from slimqwen.search.efficiency import Advantage, Efficiency, StrategyResult
from slimqwen.search.proof import Finalist, Proof
from slimqwen.search.record import Incumbent, Search, SearchTrial
from tests.search.trials import trial

STRATEGIES = ("search", "sampler alone", "random", "one lever")
LENGTH = Estimate(value=4.5, standard_error=0.02, count=18)


def passed(number: int, speed: float, share: float, size: int) -> SearchTrial:
    return trial(
        number, tokens_per_second=speed, worst_share=share, checkpoint_bytes=size, acceptance_length=LENGTH
    )


def search(*trials: SearchTrial, **fields: Any) -> Search:
    started = provenance.utc_now()
    common: dict[str, Any] = {
        "variant": "tiny", "gpu": "a10g", "timed": False, "budget": "tinyworld", "space": "choices: {}",
        "context_len": 2048, "sequences": 1, "repeated_suggestions": 3, "importance": {},
        "incumbent": Incumbent(variant="tiny-best", tokens_per_second=77_000, acceptance_length=LENGTH),
        "provenance": provenance.of_variant(variant.load("tiny"), ["slimqwen", "search"], started),
    }  # fmt: skip
    return Search(**{**common, "trials": trials, **fields})


def test_the_front_has_what_nothing_else_beats_in_all_three() -> None:
    fast, small, careful = (
        passed(1, 100_000, 0.9, 9_000_000),
        passed(2, 80_000, 0.8, 5_000_000),
        passed(3, 78_000, 0.1, 9_000_000),
    )
    beaten = passed(4, 79_000, 0.85, 6_000_000)
    ended = trial(5, rung="fidelity", reason="too far", fidelity_share=3.0)
    record = search(beaten, careful, small, fast, ended)
    assert record.front == [fast, small, careful]
    assert record.faster == [fast, small, careful]


def test_the_advice_is_the_fastest_of_the_front_or_the_incumbent(tmp_path: Path) -> None:
    found = search(
        passed(1, 100_000, 0.9, 9_000_000),
        passed(2, 154_000, 0.95, 9_500_000),
        passed(3, 200_000, 1.2, 9_500_000),
    )
    # The third's estimate lies beyond a limit; only its interval reaches back.
    assert found.advice.startswith("Fastest candidate, not proven: depth 2.")
    assert "2.00 times the 77,000 of tiny-best" in found.advice
    assert "as its roofline models it" in found.advice
    assert search(passed(1, 70_000, 0.9, 9_000_000)).advice.startswith(
        "Serve tiny-best: of 1 candidates none"
    )


def test_a_proof_decides_what_to_serve(tmp_path: Path) -> None:
    trials = passed(1, 154_000, 0.95, 9_500_000), passed(2, 100_000, 0.9, 9_000_000)
    names = {"tiny-search-1": "tiny-1", "tiny-search-2": "tiny-2"}

    def finalist(number: int, verdict: Verdict, loss: float) -> Finalist:
        finding = {"gate": "quality", "figure": "facts: gain", "low": -0.01, "high": 0.01, "limit": -0.04}
        return Finalist(
            variant=f"tiny-search-{number}", verdict=verdict, reason=None if verdict == "pass" else "quality: facts",
            p_value=0.001, adjusted_p_value=0.002, records=(),
            before=(Finding(**finding, value=0.0, verdict=Verdict.PASS),),
            after=(Finding(**finding, value=loss, verdict=verdict),),
        )  # fmt: skip

    def proof(first: Verdict) -> Proof:
        finalists = finalist(1, first, -0.1), finalist(2, Verdict.PASS, -0.001)
        return Proof(alpha=0.025, proof_share=0.5, finalists=finalists)

    record = search(*trials, proof=proof(Verdict.FAIL), proof_names=names)
    assert record.advice.startswith("Serve tiny-search-2, because it is the fastest that passed")
    assert "1.30 times" in record.advice  # not the 2.00 of the one that failed
    table = record.tables(tmp_path / "search_tiny.json")[1]
    assert [row[3:5] for row in table.rows] == [
        ("0 [-0.01, 0.01]", "-0.1 [-0.01, 0.01]"), ("0 [-0.01, 0.01]", "-0.001 [-0.01, 0.01]"),
    ]  # fmt: skip
    assert any("quality: facts" in note for note in table.notes)
    none = search(
        *trials, proof=Proof(alpha=0.025, proof_share=0.5, finalists=(finalist(1, Verdict.FAIL, -0.1),))
    )
    assert none.advice.startswith("Serve tiny-best: no finalist passed")


def test_tables_show_every_trial_with_its_rung_and_its_reason(tmp_path: Path) -> None:
    crashed = trial(2, rung="fidelity", reason="its process died (SIGSEGV)", crashed=True)
    slow = trial(3, rung="roofline", reason="slower than tiny-best, even at its bound")
    record = search(passed(1, 100_000, 0.9, 9_000_000), crashed, slow, importance={"depth": 0.7, "mlp": 0.3})
    front, rungs, trials, importance = record.tables(tmp_path / "search_tiny.json")
    assert len(front.rows) == 1
    assert any("No speed here was measured on a GPU" in note for note in front.notes)
    assert [row[:4] for row in rungs.rows] == [
        ("roofline", "1", "0", "0"), ("fidelity", "1", "1", "0"), ("acceptance", "0", "0", "0"),
        ("speed", "0", "0", "1"),
    ]  # fmt: skip
    assert [row[3] for row in trials.rows] == [
        "passed every rung", "its process died (SIGSEGV)", "slower than tiny-best, even at its bound",
    ]  # fmt: skip
    assert [row[0] for row in importance.rows] == ["depth", "mlp"]


def test_the_chart_has_the_line_of_the_limit_and_a_line_for_every_trial() -> None:
    record = search(
        passed(1, 100_000, 0.9, 9_000_000), passed(2, 154_000, 0.95, 9_500_000), importance={"depth": 1.0}
    )
    front, levers, importance = record.panels()
    limit = next(line for line in front.lines if line.label == "limit")
    assert list(limit.x) == [1, 1]
    points = next(line for line in front.lines if line.label == "front")
    assert points.errors is not None
    assert points.errors[0] == pytest.approx(100_000 * 1.96 * 0.02 / 4.5)
    assert levers.positions == ["depth"]
    assert len(levers.lines) == 2
    assert importance.bars == ["depth"]
    chart = charts.of_record(record)
    assert chart is not None
    charts.draw([chart])
    assert chart.svg.startswith("<svg")


def test_the_record_shows_whether_the_search_was_worth_it(tmp_path: Path) -> None:
    trials = passed(1, 100_000, 0.9, 9_000_000), passed(2, 154_000, 0.95, 9_500_000)
    best = [Estimate(value=value, standard_error=0.01, count=20) for value in (1.5, 1.3, 1.2, 1.25)]
    lucky = [
        StrategyResult(strategy=name, best=each, by_evaluations=(1.0, each.value))
        for name, each in zip(STRATEGIES, best, strict=True)
    ]
    advantages = [
        Advantage(strategy=mine, over=other, difference=Difference(value=gain, standard_error=0.02, low=gain - 0.04,
                  high=gain + 0.04, count=20))
        for mine, other, gain in (("search", "random", 0.3), ("search", "one lever", 0.25),
                                  ("sampler alone", "random", 0.01), ("sampler alone", "one lever", -0.05))
    ]  # fmt: skip
    played = Efficiency(seeds=20, evaluations=2, trials=2, results=lucky, advantages=advantages)
    record = search(*trials, efficiency=played)
    table = record.tables(tmp_path / "search_tiny.json")[-1]
    assert [row[:2] for row in table.rows] == [
        ("search", "1.500 ± 0.010"), ("sampler alone", "1.300 ± 0.010"), ("random", "1.200 ± 0.010"),
        ("one lever", "1.250 ± 0.010"),
    ]  # fmt: skip
    assert table.notes[0].endswith(
        "the search beats random (+0.300 [+0.260, +0.340]) and beats one lever (+0.250 [+0.210, +0.290]); its sampler "
        "alone does no better than random (+0.010 [-0.030, +0.050]) and loses to one lever (-0.050 [-0.090, -0.010])."
    )
    panel = record.panels()[-1]
    assert [line.label for line in panel.lines] == list(STRATEGIES)
    assert list(panel.lines[0].x) == [1, 2]
