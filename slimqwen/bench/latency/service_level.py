"""Throughput at a service level: output tokens a second of the requests that met the limits of TTFT and TPOT."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slimqwen.bench.latency.record import Goodput, Latency
from slimqwen.records import store
from slimqwen.stats import intervals


@dataclass(frozen=True)
class GoodThroughput:
    """Throughput of a server within a service level under one load.

    Attributes:
        prompt_class: class of the workload.
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
    levels = {name: row.goodput for name, row in record.classes.items() if row.goodput}
    if not levels:
        return []
    tokens: dict[str, dict[int, int]] = {name: {} for name in levels}
    for item in store.read_items(path):
        level = levels.get(item["class"])
        if level is None or item["error"] is not None:
            continue
        if item["ttft_ms"] <= level.ttft_ms and item["tpot_ms"] <= level.tpot_ms:
            round_tokens, number = tokens[item["class"]], item.get("round", 0)
            round_tokens[number] = round_tokens.get(number, 0) + item["output_tokens"]
    throughputs = []
    for name, level in levels.items():
        row = record.classes[name]
        durations = row.durations_s or (row.duration_s,)
        amounts = (
            [tokens[name].get(number, 0) for number in range(len(durations))]
            if row.durations_s
            else [sum(tokens[name].values())]
        )
        interval = None
        if len(durations) > 1:
            rate = intervals.rate_over_rounds(amounts, durations)
            interval = max(rate.low, 0.0), rate.high
        throughputs.append(
            GoodThroughput(
                name,
                row.arrival.rate_per_s if row.arrival else None,
                level,
                level.good_count / row.request_count,
                sum(amounts) / sum(durations),
                interval,
            )
        )
    return throughputs


def best(loads: Sequence[GoodThroughput]) -> GoodThroughput | None:
    """The load under which most tokens meet the service level; None without one."""
    return max(loads, key=lambda load: load.tokens_per_s, default=None)
