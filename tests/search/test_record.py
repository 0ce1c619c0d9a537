"""The record of a search: its advice, and what its tables show."""

from pathlib import Path
from typing import Any

import pytest

from slimqwen import variant
from slimqwen.records import provenance, store
from slimqwen.records.record import Finding, Verdict
from slimqwen.search.proof import Finalist, Proof
from slimqwen.search.record import Incumbent, Search, Sensitivity, Trial


def finding(gate: str, figure: str, value: float, limit: float, verdict: str = "pass") -> Finding:
    return Finding(
        gate=gate, figure=figure, value=value, low=0.9 * value, high=1.1 * value, limit=limit, verdict=Verdict(verdict)
    )  # fmt: skip


FINDINGS = (
    finding("fidelity", "kl_nats", 0.001, 0.003),
    finding("acceptance", "acceptance length at K = 4, share of the baseline's", 0.99, 0.97),
)


def trial(number: int, speed: float | None, **fields: Any) -> Trial:
    common: dict[str, Any] = {
        "name": f"tiny-{number}", "changes": {"mlp": "W4A16", "depth": number}, "forecast_kl_nats": 0.002,
        "forecast_acceptance_share": 0.98, "forecast_tokens_per_second": 90_000, "findings": FINDINGS, "reason": "",
        "tokens_per_second": speed,
    }  # fmt: skip
    return Trial(**{**common, **fields})


def search(*trials: Trial, **fields: Any) -> Search:
    started = provenance.utc_now()
    costs = (
        Sensitivity(change="mlp W8A16", kl_nats=0.0001, acceptance_share=None, saved=0.21),
        Sensitivity(change="mtp W4A16 in groups of 32", kl_nats=None, acceptance_share=0.985, saved=0.1),
    )
    common: dict[str, Any] = {
        "variant": "tiny", "gpu": "a10g", "budget": "tinyworld", "sensitivities": costs, "is_timed": False,
        "incumbent": Incumbent(variant="tiny-best", tokens_per_second=77_000, acceptance_share=1.0),
        "winner": None, "proof": None,
        "provenance": provenance.of_variant(variant.load("tiny"), ["slimqwen", "search"], started),
    }  # fmt: skip
    return Search(**{**common, "trials": trials, **fields})


def proof(verdict: str) -> Proof:
    reason = None if verdict == "pass" else "quality: facts"
    finalist = Finalist(
        variant="tiny-1", verdict=verdict, reason=reason, p_value=0.001, adjusted_p_value=0.001, record=None,
        findings=(),
    )  # fmt: skip
    return Proof(alpha=0.025, proof_share=0.5, finalists=(finalist,))


def test_a_proven_winner_is_served() -> None:
    record = search(trial(1, 154_000), trial(2, 100_000), winner="tiny-1", proof=proof("pass"))
    assert record.advice.startswith("Serve tiny-1: it passed every check")
    assert "by the roofline of the a10g it is 2.00 times as fast as tiny-best" in record.advice


@pytest.mark.parametrize("verdict", ["fail", "inconclusive"])
def test_a_winner_that_is_not_proven_is_not_served(verdict: str) -> None:
    record = search(trial(1, 154_000), winner="tiny-1", proof=proof(verdict))
    assert record.advice.startswith("Serve tiny-best: tiny-1, 2.00 times as fast")
    assert "(quality: facts)" in record.advice


def test_a_search_without_a_winner_says_what_it_looked_at() -> None:
    ended = trial(1, None, reason="fidelity: kl_nats fail")
    assert search(ended).advice.startswith("Serve tiny-best: none of 1 candidates on the front kept within")
    assert search().advice.startswith("Serve tiny-best: no candidate of the front kept within")


def test_a_timing_counts_for_more_than_the_roofline() -> None:
    timed = trial(1, 154_000, speedup=1.3)
    record = search(timed, is_timed=True, winner="tiny-1", proof=proof("pass"))
    assert "timed on the a10g it is 1.30 times as fast as tiny-best" in record.advice


def test_tables_show_forecasts_beside_measurements_and_what_each_change_costs() -> None:
    ended = trial(2, None, reason="acceptance: share fail", findings=FINDINGS[:1])
    tables = search(trial(1, 154_000), ended, winner="tiny-1", proof=proof("pass")).tables(Path("x.json"))
    assert tables[0].rows == (
        (
            "mlp W4A16, depth 1", "-", "0.00200", "0.00100 [0.00090, 0.00110]", "0.980", "0.990 [0.891, 1.089]",
            "154,000", "2.00",
        ),
        (
            "mlp W4A16, depth 2", "acceptance: share fail", "0.00200", "0.00100 [0.00090, 0.00110]", "0.980", "-",
            "90,000", "-",
        ),
    )  # fmt: skip
    assert any("Nothing was timed: there is no a10g here" in note for note in tables[0].notes)
    assert tables[1].rows == (("tiny-1", "every figure within its limit", "pass", "0.001"),)
    assert tables[2].rows == (
        ("mlp W8A16", "0.00010", "-", "21.0%"),
        ("mtp W4A16 in groups of 32", "-", "0.985", "10.0%"),
    )


def test_the_kept_records_of_searches_can_be_read() -> None:
    root = variant.repository_root()
    records = [
        store.read_record(path, Search) for path in (root / "experiments" / "tiny").glob("search_*.json")
    ]
    assert any(record.advice.startswith("Serve tiny-search-7: it passed") for record in records)
