"""The record of a search: its front, its advice, and what its tables show."""

from pathlib import Path
from typing import Any

from tests.search.trials import trial

from slimqwen import variant
from slimqwen.records import provenance, store
from slimqwen.records.record import Estimate, Finding, Verdict
from slimqwen.search.proof import Finalist, Proof
from slimqwen.search.record import RUNGS, Incumbent, Search, SearchTrial

LENGTH = Estimate(value=4.5, standard_error=0.02, count=18)


def passed(number: int, speed: float, share: float, size: int) -> SearchTrial:
    return trial(
        number, tokens_per_second=speed, worst_share=share, checkpoint_bytes=size, acceptance_length=LENGTH
    )


def search(*trials: SearchTrial, **fields: Any) -> Search:
    started = provenance.utc_now()
    common: dict[str, Any] = {
        "variant": "tiny", "gpu": "a10g", "budget": "tinyworld", "space": "choices: {}", "context_len": 2048,
        "sequences": 1,
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
    assert found.advice.startswith("Fastest candidate, not proven: depth 2;")
    assert "2.00 times as fast as tiny-best by the roofline of the a10g" in found.advice
    assert search(passed(1, 70_000, 0.9, 9_000_000)).advice.startswith(
        "Serve tiny-best: of 1 candidates none"
    )


def test_a_proof_decides_what_to_serve(tmp_path: Path) -> None:
    trials = passed(1, 154_000, 0.95, 9_500_000), passed(2, 100_000, 0.9, 9_000_000)

    def finalist(number: int, verdict: Verdict, loss: float) -> Finalist:
        finding = {"gate": "quality", "figure": "facts: gain", "low": -0.01, "high": 0.01, "limit": -0.04}
        return Finalist(
            variant=f"tiny-{number}", verdict=verdict, reason=None if verdict == "pass" else "quality: facts",
            p_value=0.001, adjusted_p_value=0.002, record=None,
            findings=(Finding(**finding, value=loss, verdict=verdict),),
        )  # fmt: skip

    def proof(first: Verdict) -> Proof:
        finalists = finalist(1, first, -0.1), finalist(2, Verdict.PASS, -0.001)
        return Proof(alpha=0.025, proof_share=0.5, finalists=finalists)

    record = search(*trials, proof=proof(Verdict.FAIL))
    assert record.advice.startswith("Serve tiny-2: it passed every check")
    assert "1.30 times" in record.advice  # not the 2.00 of the one that failed
    table = record.tables(tmp_path / "search_tiny.json")[1]
    assert table.rows == (
        ("tiny-1", "quality: facts", "fail", "0.002"),
        ("tiny-2", "every figure within its limit", "pass", "0.002"),
    )
    none = search(
        *trials, proof=Proof(alpha=0.025, proof_share=0.5, finalists=(finalist(1, Verdict.FAIL, -0.1),))
    )
    assert none.advice.startswith("Serve tiny-best: no finalist passed")


def test_tables_show_the_front_and_where_the_others_ended(tmp_path: Path) -> None:
    crashed = trial(2, rung="fidelity", reason="its process died (SIGSEGV)", crashed=True)
    slow = [
        trial(number, rung="roofline", reason="even its bound is slower than tiny-best") for number in (3, 4)
    ]
    record = search(passed(1, 100_000, 0.9, 9_000_000), crashed, *slow)
    front, ended = record.tables(tmp_path / "search_tiny.json")
    assert front.rows == (("depth 1", "100,000", "1.30", "4.500 ± 0.020", "-", "-", "90%", "9.00"),)
    assert any("No speed here was measured" in note for note in front.notes)
    assert ended.rows == (
        ("roofline", "even its bound is slower than tiny-best", "2", "0"),
        ("fidelity", "its process died (SIGSEGV)", "1", "1"),
        ("acceptance", "-", "0", "0"),
        ("speed", "-", "1", "0"),
    )


def test_the_kept_record_of_a_search_is_one() -> None:
    root = variant.repository_root()
    record = store.read_record(store.latest(root / "experiments" / "tiny", Search), Search)
    assert record.advice.startswith("Serve tiny-search-7: it passed")
    assert {trial.rung for trial in record.trials} == set(RUNGS)
