"""Computes the figures of a prompt class from the rows of its requests."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slimqwen.bench.latency.measured_variant import ClassResults
from slimqwen.bench.latency.record import Distribution, Goodput, ServedAcceptance
from slimqwen.bench.workload import ServiceLevel
from slimqwen.stats import intervals
from slimqwen.stats.estimates import Estimate

PERCENTILES = (90, 95, 99)

Row = Mapping[str, Any]
"""Fields of a request: class, round, index, prompt_tokens, output_tokens, ttft_ms, tpot_ms, e2el_ms, itl_ms, error."""


def summarise(
    rows: Sequence[Row], duration_s: float, service_level: ServiceLevel | None = None
) -> dict[str, Any]:
    """Compute counts, rates and times of one class, as fields of the record's `ClassFigures`.

    Args:
        rows: all requests of the class; those with an error count as failures and have no part in times and rates.
        duration_s: wall time over all rounds, seconds.
        service_level: limits for the goodput; None for no goodput.

    Raises:
        TooFewItemsError: fewer than two requests succeeded.
    """
    successes = [row for row in rows if row["error"] is None]
    output_tokens = sum(row["output_tokens"] for row in successes)
    all_tokens = output_tokens + sum(row["prompt_tokens"] for row in successes)
    return {
        "request_count": len(rows),
        "failure_count": len(rows) - len(successes),
        "duration_s": duration_s,
        "request_throughput_per_s": len(successes) / duration_s,
        "output_throughput_tokens_per_s": output_tokens / duration_s,
        "total_throughput_tokens_per_s": all_tokens / duration_s,
        **{name: _per_request(successes, name) for name in ("ttft_ms", "tpot_ms", "e2el_ms")},
        "itl_ms": _inter_token(successes),
        "goodput": _goodput(successes, duration_s, service_level),
    }


def acceptance(result: ClassResults) -> ServedAcceptance | None:
    """Compute a class's acceptance length and rates from the server's counters; None if nothing was drafted."""
    if not result.drafts:
        return None
    return ServedAcceptance(
        length=1 + result.accepted_tokens / result.drafts,
        drafts=result.drafts,
        draft_tokens=result.draft_tokens,
        accepted_tokens=result.accepted_tokens,
        per_position_rates=tuple(accepted / result.drafts for accepted in result.accepted_by_position),
    )


def _per_request(rows: Sequence[Row], name: str) -> Distribution:
    values = [row[name] for row in rows]
    return _distribution(values, intervals.mean(values, clusters=_rounds(rows)), len(rows))


def _inter_token(rows: Sequence[Row]) -> Distribution:
    streamed = [row for row in rows if row["itl_ms"]]
    gaps = [row["itl_ms"] for row in streamed]
    # The gaps of one request are dependent, so their mean is one observation, weighted by the number of gaps.
    estimate = intervals.mean(
        [np.mean(each) for each in gaps], [len(each) for each in gaps], _rounds(streamed)
    )
    return _distribution([gap for each in gaps for gap in each], estimate, len(gaps))


def _distribution(values: Sequence[float], estimate: Estimate, request_count: int) -> Distribution:
    # At least one request must be expected beyond a percentile: the 99th of fewer than 100 is the maximum.
    percents = [percent for percent in PERCENTILES if request_count * (100 - percent) >= 100]
    return Distribution(
        mean=estimate.value,
        standard_error=estimate.standard_error,
        median=float(np.median(values)),
        **{f"p{percent}": float(np.percentile(values, percent)) for percent in percents},
    )


def _goodput(rows: Sequence[Row], duration_s: float, service_level: ServiceLevel | None) -> Goodput | None:
    if service_level is None:
        return None
    good = sum(map(service_level.is_met_by, rows))
    return Goodput(**service_level.model_dump(), good_count=good, requests_per_s=good / duration_s)


def _rounds(rows: Sequence[Row]) -> list[int] | None:
    """Round of each request, as independent observations; None if there is one round, so that requests are."""
    numbers = [row.get("round", 0) for row in rows]
    return numbers if len(set(numbers)) > 1 else None
