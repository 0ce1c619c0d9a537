"""Two variants against each other, on the same items and the same machine, from their records."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimqwen.errors import SlimqwenError
from slimqwen.evaluation import statistics, verdict
from slimqwen.records import store

LATENCY_MEASURES = ("ttft_ms", "tpot_ms", "e2el_ms")


class NotComparableError(SlimqwenError):
    """Both variants have records, but none of the one fits any of the other; names what differs and the cure."""


@dataclass(frozen=True)
class QualityRow:
    """One task: both scores, the paired difference (second minus first) over its items, and whether it is a loss.

    `discordance` is None where items are not simply right or wrong.
    """

    task: str
    measure: str
    higher_is_better: bool
    first: float
    second: float
    difference: statistics.Difference
    discordance: statistics.Discordance | None
    judgement: verdict.Judgement


@dataclass(frozen=True)
class LatencyRow:
    """One figure of one class: both medians in milliseconds, and how many times as fast the second is."""

    prompt_class: str
    prompt_tokens: int
    output_tokens: int
    measure: str
    first_ms: float
    second_ms: float
    speedup: statistics.Ratio


def quality_pair(first: Path, second: Path) -> tuple[Path, Path]:
    """The newest quality records of two variants' folders that stand on the same items.

    Raises:
        MissingRecordError: a variant has no quality record.
        NotComparableError: suite, limit or data files differ in every pair.
    """
    return _newest_pair(first, second, "quality", _quality_basis, _quality_command)


def latency_pair(first: Path, second: Path) -> tuple[Path, Path]:
    """The newest latency records of two variants' folders with the same requests on the same hardware.

    Raises:
        MissingRecordError: a variant has no latency record.
        NotComparableError: workload, lengths or hardware differ in every pair.
    """
    return _newest_pair(first, second, "latency", _latency_basis, _latency_command)


def compare_quality(first: Path, second: Path) -> list[QualityRow]:
    """Pair two quality records item by item.

    Raises:
        NotComparableError: they do not stand on the same items.
        RecordError: a record or its items are damaged.
    """
    a, b = store.read(first), store.read(second)
    _require_same(first, second, _quality_basis(a), _quality_basis(b), _quality_command(b["variant"], a))
    items_a, items_b = _by_task(first), _by_task(second)
    rows = []
    for task, row in a["tasks"].items():
        mine, theirs = items_a[task], items_b[task]
        ids_a, ids_b = [i["item"] for i in mine], [i["item"] for i in theirs]
        _require_same(first, second, {f"items of {task}": ids_a}, {f"items of {task}": ids_b}, "")
        values_a, values_b = [i["value"] for i in mine], [i["value"] for i in theirs]
        difference = statistics.paired_difference(values_a, values_b, [i["weight"] for i in mine])
        discordance = None
        if set(values_a) | set(values_b) <= {0.0, 1.0}:
            discordance = statistics.mcnemar([v == 1 for v in values_a], [v == 1 for v in values_b])
        rows.append(
            QualityRow(
                task=task,
                measure=row["measure"],
                higher_is_better=row["higher_is_better"],
                first=row["value"],
                second=b["tasks"][task]["value"],
                difference=difference,
                discordance=discordance,
                judgement=verdict.judge(
                    difference,
                    discordance,
                    margin=row["non_inferiority_margin"],
                    higher_is_better=row["higher_is_better"],
                ),
            )
        )
    return rows


def compare_latency(first: Path, second: Path) -> list[LatencyRow]:
    """Ratios of medians of two latency records, with bootstrap intervals over requests.

    Raises:
        NotComparableError: requests or hardware differ.
        RecordError: a record or its items are damaged.
    """
    a, b = store.read(first), store.read(second)
    _require_same(first, second, _latency_basis(a), _latency_basis(b), _latency_command(b["variant"], a))
    items_a, items_b = store.read_items(first), store.read_items(second)

    def values(items: list[dict[str, Any]], name: str, measure: str) -> list[float]:
        return [item[measure] for item in items if item["class"] == name and item["error"] is None]

    return [
        LatencyRow(
            prompt_class=name,
            prompt_tokens=row["prompt_tokens"],
            output_tokens=row["output_tokens"],
            measure=measure,
            first_ms=row[measure]["median"],
            second_ms=b["classes"][name][measure]["median"],
            speedup=statistics.ratio_of_medians(
                values(items_a, name, measure), values(items_b, name, measure)
            ),
        )
        for name, row in a["classes"].items()
        for measure in LATENCY_MEASURES
    ]


def _newest_pair(
    first: Path,
    second: Path,
    kind: str,
    basis: Callable[[store.Record], Mapping[str, Any]],
    command: Callable[[str, store.Record], str],
) -> tuple[Path, Path]:
    newest = store.latest(first, kind), store.latest(second, kind)
    others = [(path, basis(store.read(path))) for path in store.records(second, kind)]
    for path in store.records(first, kind):
        own = basis(store.read(path))
        for other, theirs in others:
            if own == theirs:
                return path, other
    a, b = (store.read(path) for path in newest)
    _require_same(*newest, basis(a), basis(b), command(b["variant"], a))
    raise AssertionError("the newest records were found different above")


def _require_same(first: Path, second: Path, a: Mapping[str, Any], b: Mapping[str, Any], cure: str) -> None:
    different = [name for name in {**a, **b} if a.get(name) != b.get(name)]
    if different:
        shown = ", ".join(
            f"{name} ({a.get(name)} and {b.get(name)})" if isinstance(a.get(name), str | int) else name
            for name in different
        )
        raise NotComparableError(
            f"{first.parent.name}/{first.name} and {second.parent.name}/{second.name} differ in {shown}; "
            + (f"`{cure}` makes one that fits" if cure else "measure both again")
        )


def _quality_basis(record: store.Record) -> dict[str, Any]:
    return {
        "suite": record["suite"],
        "limit": record["limit"] or "all items",
        "measures": {name: row["measure"] for name, row in record["tasks"].items()},
        **{f"data file {name}": digest for name, digest in record["provenance"]["datasets"].items()},
    }


def _latency_basis(record: store.Record) -> dict[str, Any]:
    hardware = record["provenance"]["hardware"]
    return {
        "workload": record["workload"],
        "lengths": {
            name: (row["prompt_tokens"], row["output_tokens"], row["concurrency"])
            for name, row in record["classes"].items()
        },
        "hardware": {name: hardware[name] for name in ("cpu_model", "cpu_count", "gpus")},
        **{f"data file {name}": digest for name, digest in record["provenance"]["datasets"].items()},
    }


def _quality_command(variant: str, like: store.Record) -> str:
    extent = "--full" if like["limit"] is None else f"--limit {like['limit']}"
    return f"python scripts/eval_quality.py --variant {variant} --suite {like['suite']} {extent}"


def _latency_command(variant: str, like: store.Record) -> str:
    return f"python scripts/eval_latency.py --variant {variant} --workload {like['workload']}"


def _by_task(path: Path) -> dict[str, list[dict[str, Any]]]:
    tasks: dict[str, list[dict[str, Any]]] = {}
    for item in store.read_items(path):
        tasks.setdefault(item["task"], []).append(item)
    return tasks
