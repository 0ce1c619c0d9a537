"""Throughput at a service level: output tokens a second of the requests that met the limits of TTFT and TPOT."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slimqwen.bench.latency.record import Goodput, Latency
from slimqwen.bench.latency.speedups import by_class_and_round
from slimqwen.records import store
from slimqwen.stats import intervals


@dataclass(frozen=True)
class GoodThroughput:
    """Throughput of a server within a service level under one load.

    Attributes:
        rate_per_s: requests that arrive a second; None where all are sent at once.
        level: the service level, and how many requests met it.
        good_share: share of all requests that met it.
        tokens_per_s: output tokens a second of these requests.
        interval: 95 % interval of tokens_per_s over rounds; None with a single round.
    """

    prompt_class: str
    rate_per_s: float | None
    level: Goodput
    good_share: float
    tokens_per_s: float
    interval: tuple[float, float] | None


def good_throughput(record: Latency, path: Path) -> list[GoodThroughput]:
    """Throughput within the service level of each class; none of a workload without one.

    Args:
        path: its file; the items lie beside it.

    Raises:
        RecordError: the items are damaged.
    """
    if not any(row.goodput for row in record.classes.values()):
        return []
    requests = by_class_and_round(store.read_items(path))
    throughputs = []
    for name, row in record.classes.items():
        level = row.goodput
        if level is None:
            continue
        is_good = level.service_level.is_met_by
        # A round without a good request counts by its duration.
        tokens = dict.fromkeys(range(len(row.durations_s or ())), 0)
        for number, answers in requests.get(name, {}).items():
            tokens[number] = sum(answer["output_tokens"] for answer in answers if is_good(answer))
        interval = None
        if row.durations_s and len(row.durations_s) > 1:
            rate = intervals.rate_over_rounds(list(tokens.values()), row.durations_s)
            interval = max(rate.low, 0.0), rate.high
        throughputs.append(
            GoodThroughput(
                name,
                row.arrival.rate_per_s if row.arrival else None,
                level,
                level.good_count / row.request_count,
                sum(tokens.values()) / row.duration_s,
                interval,
            )
        )
    return throughputs


def best(loads: Sequence[GoodThroughput]) -> GoodThroughput | None:
    """The load under which most tokens meet the service level; None without one."""
    return max(loads, key=lambda load: load.tokens_per_s, default=None)
