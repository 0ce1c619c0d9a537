"""Two variants against each other, on the same items and the same machine, from their records."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slimqwen.errors import SlimqwenError
from slimqwen.evaluation import statistics, verdict
from slimqwen.records import store

LATENCY_MEASURES = ("ttft_ms", "tpot_ms", "e2el_ms")

ALL_CLASSES = "all classes"


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
    """One figure of one class of both variants, and how many times as good the second is.

    Attributes:
        prompt_class: its name, or `ALL_CLASSES`.
        prompt_tokens: of a prompt; None for all classes together.
        output_tokens: of an answer; None for all classes together.
        measure: a time in milliseconds (its median, but for `wall_ms`), or a rate per second.
        first: the figure of the first variant.
        second: the figure of the second.
        speedup: None where the first is nothing; over rounds, the geometric mean of theirs.
        interval: of the speed-up at 95 %; None where it can be neither over rounds nor over requests.
        rounds: that the interval is over; 0 where it is over requests.
    """

    prompt_class: str
    prompt_tokens: int | None
    output_tokens: int | None
    measure: str
    first: float
    second: float
    speedup: float | None
    interval: tuple[float, float] | None
    rounds: int


def quality_pair(first: Path, second: Path) -> tuple[Path, Path]:
    """The quality records of two variants' folders that stand on the same items, of the checkpoints scored last.

    Of several pairs it is the one on most items, so that a sample does not hide all items; of these one of the same
    hardware, for another instruction set changes answers too; of these the newest.

    Raises:
        MissingRecordError: a variant has no quality record.
        NotComparableError: suite, limit or data files differ in every pair.
    """
    sides = []
    for folder in (first, second):
        digest = store.read(store.latest(folder, "quality"))["provenance"]["checkpoint"]["digest"]
        found = ((path, store.read(path)) for path in store.records(folder, "quality"))
        sides.append([(p, r) for p, r in found if r["provenance"]["checkpoint"]["digest"] == digest])
    pairs = [
        (pair_weight(a, b), path.name, other.name, path, other)
        for path, a in sides[0]
        for other, b in sides[1]
        if quality_basis(a) == quality_basis(b)
    ]
    if pairs:
        *_, path, other = max(pairs)
        return path, other
    return _newest_pair(first, second, "quality", quality_basis, _quality_command)


def latency_pair(first: Path, second: Path, workload: str) -> tuple[Path, Path]:
    """The newest latency records of two variants' folders with the same requests on the same hardware.

    Raises:
        MissingRecordError: a variant has no latency record of the workload.
        NotComparableError: lengths, arrivals or hardware differ in every pair.
    """

    def of_workload(record: store.Record) -> bool:
        return bool(record["workload"] == workload)

    return _newest_pair(first, second, "latency", latency_basis, _latency_command, of_workload)


def shared_workloads(first: Path, second: Path) -> list[str]:
    """The workloads that both variants' folders have latency records of, the prompt classes first.

    Raises:
        MissingRecordError: a variant has no latency record.
        NotComparableError: they have no workload in common.
    """
    newest = store.latest(first, "latency"), store.latest(second, "latency")
    found = [
        {store.read(path)["workload"] for path in store.records(one, "latency")} for one in (first, second)
    ]
    shared = sorted(found[0] & found[1], key=lambda name: (name != "classes", name))
    if not shared:
        a, b = (store.read(path) for path in newest)
        _require_same(*newest, latency_basis(a), latency_basis(b), _latency_command(b["variant"], a))
    return shared


def coverage(record: store.Record) -> tuple[bool, int]:
    """How much a quality record says of its variant, the more the greater: completions before chats, then items."""
    return record.get("endpoint") != "chat", _items_scored(record)


def pair_weight(first: store.Record, second: store.Record) -> tuple[int, bool]:
    """How much two quality records on the same items say of each other: the items, then whether the hardware is one."""
    return _items_scored(first), _hardware(first) == _hardware(second)


def quality_basis(record: store.Record) -> dict[str, Any]:
    """What two quality records have to share to be compared."""
    return {
        "suite": record["suite"],
        "limit": record["limit"] or "all items",
        "endpoint": record["endpoint"],
        "settings": {name: row["settings"] for name, row in record["tasks"].items()},
        "measures": {name: row["measure"] for name, row in record["tasks"].items()},
        **{f"data file {name}": digest for name, digest in record["provenance"]["datasets"].items()},
    }


def latency_basis(record: store.Record) -> dict[str, Any]:
    """What two latency records have to share to be compared."""
    return {
        "workload": record["workload"],
        "lengths": {
            name: (row["prompt_tokens"], row["output_tokens"], row["concurrency"])
            for name, row in record["classes"].items()
        },
        # Records before arrivals: all requests were sent as soon as the concurrency let them.
        "arrivals": {name: row.get("arrival") for name, row in record["classes"].items()},
        "hardware": _hardware(record),
        **{f"data file {name}": digest for name, digest in record["provenance"]["datasets"].items()},
    }


def compare_quality(first: Path, second: Path) -> list[QualityRow]:
    """Pair two quality records item by item.

    Raises:
        NotComparableError: they do not stand on the same items.
        RecordError: a record or its items are damaged.
    """
    a, b = store.read(first), store.read(second)
    _require_same(first, second, quality_basis(a), quality_basis(b), _quality_command(b["variant"], a))
    items_a, items_b = by_task(first), by_task(second)
    rows = []
    for task, row in a["tasks"].items():
        mine, theirs = items_a[task], items_b[task]
        ids_a, ids_b = [i["item"] for i in mine], [i["item"] for i in theirs]
        _require_same(first, second, {f"items of {task}": ids_a}, {f"items of {task}": ids_b}, "")
        rows.append(compare_items(task, row, b["tasks"][task]["value"], mine, theirs))
    return rows


def compare_items(
    task: str,
    row: Mapping[str, Any],
    second_value: float,
    mine: Sequence[Mapping[str, Any]],
    theirs: Sequence[Mapping[str, Any]],
) -> QualityRow:
    """Pair the items of one task.

    Args:
        task: its name.
        row: what the first's record says of it.
        second_value: the second's score.
        mine: the first's items.
        theirs: the second's, the same in the same order.
    """
    values_a, values_b = [i["value"] for i in mine], [i["value"] for i in theirs]
    weights = [i["weight"] for i in mine]
    clusters = [i.get("cluster") or number for number, i in enumerate(mine)]
    answers_a, totals = statistics.by_cluster(values_a, weights, clusters)
    answers_b, _ = statistics.by_cluster(values_b, weights, clusters)
    discordance = None
    if set(answers_a) | set(answers_b) <= {0.0, 1.0}:
        discordance = statistics.mcnemar([v == 1 for v in answers_a], [v == 1 for v in answers_b])
        estimate = statistics.mean(answers_b - answers_a, totals)
        # The exact interval is the one that is judged and shown: a bootstrap would be a third of a second for nothing.
        interval = verdict.paired_proportion_interval(discordance, estimate.count)
        difference = statistics.Difference(estimate.value, estimate.standard_error, *interval, estimate.count)
    else:
        difference = statistics.paired_difference(values_a, values_b, weights, clusters)
    return QualityRow(
        task=task,
        measure=row["measure"],
        higher_is_better=row["higher_is_better"],
        first=row["value"],
        second=second_value,
        difference=difference,
        discordance=discordance,
        judgement=verdict.judge(
            difference,
            discordance,
            margin=row["non_inferiority_margin"],
            higher_is_better=row["higher_is_better"],
        ),
    )


def compare_latency(first: Path, second: Path) -> list[LatencyRow]:
    """Two latency records: medians of times by class, rates where requests overlap, and the time of all classes.

    Intervals are over rounds where both have two or more (`statistics.ratio_by_round`), paired where they took turns;
    else over requests. A rate of requests that overlap has none then: they depend on each other.

    Raises:
        NotComparableError: requests or hardware differ.
        RecordError: a record or its items are damaged.
    """
    a, b = store.read(first), store.read(second)
    _require_same(first, second, latency_basis(a), latency_basis(b), _latency_command(b["variant"], a))
    in_turns = a["run"] == b["run"]
    items = [store.read_items(path) for path in (first, second)]
    sides = [by_class_and_round(one) for one in items]
    rows = []
    for name, row in a["classes"].items():
        other = b["classes"][name]
        shape = (name, row["prompt_tokens"], row["output_tokens"])
        for measure in LATENCY_MEASURES:
            times = [by_round(side[name], measure) for side in sides]
            ratio, rounds = statistics.ratio_by_round(*times, in_turns=in_turns)
            rows.append(
                LatencyRow(
                    *shape,
                    measure,
                    row[measure]["median"],
                    other[measure]["median"],
                    ratio.value,
                    (ratio.low, ratio.high),
                    rounds,
                )
            )
        if row["concurrency"] != 1 and "durations_s" in row:
            rows += _rates(shape, row, other, [side[name] for side in sides], in_turns)
    together = all_classes((a, items[0]), (b, items[1]))
    return [*rows, together] if together else rows


def all_classes(
    first: tuple[store.Record, Sequence[Mapping[str, Any]]],
    second: tuple[store.Record, Sequence[Mapping[str, Any]]],
) -> LatencyRow | None:
    """The time of all requests of two latency records that were made alike: the speed on this mix of classes.

    Args:
        first: a record with its items, the baseline's.
        second: the other's.

    Returns:
        None where requests overlapped, or a class has none that succeeded on both sides.
    """
    records = first[0], second[0]
    sides = [by_class_and_round(items) for _, items in (first, second)]
    rows = [row for record in records for row in record["classes"].values()]
    if any(row["concurrency"] != 1 for row in rows) or any(
        name not in side for name in records[0]["classes"] for side in sides
    ):
        return None
    counts = [{name: row["request_count"] for name, row in record["classes"].items()} for record in records]
    found = time_of_all(sides, counts, in_turns=records[0]["run"] == records[1]["run"])
    speedup = found.speedup
    return LatencyRow(
        ALL_CLASSES,
        None,
        None,
        "wall_ms",
        found.first_ms,
        found.second_ms,
        speedup.value,
        (speedup.low, speedup.high),
        found.rounds,
    )


Rounds = Mapping[int, Sequence[Mapping[str, Any]]]
"""The requests of a class, by the number of their round."""


def by_class_and_round(items: Sequence[Mapping[str, Any]]) -> dict[str, Rounds]:
    """The requests of a latency record that succeeded."""
    found: dict[str, dict[int, list[Mapping[str, Any]]]] = {}
    for item in items:
        if item["error"] is None:
            found.setdefault(item["class"], {}).setdefault(item.get("round", 0), []).append(item)
    return dict(found)


def by_round(rounds: Rounds, measure: str) -> dict[int, list[float]]:
    """One figure of every request of a class, by round."""
    return {number: [float(request[measure]) for request in one] for number, one in rounds.items()}


@dataclass(frozen=True)
class TimeOfAll:
    """How long all requests of two sides took, end to end.

    Attributes:
        first_ms: of the first side.
        second_ms: of the second.
        speedup: how many times as fast the second is.
        rounds: that its interval is over; 0 where it is over requests.
    """

    first_ms: float
    second_ms: float
    speedup: statistics.Ratio
    rounds: int


def time_of_all(
    sides: Sequence[Mapping[str, Rounds]], counts: Sequence[Mapping[str, int]], *, in_turns: bool
) -> TimeOfAll:
    """The time of all requests of two sides; one that failed counts as the mean of its class.

    Args:
        sides: two, by class and round.
        counts: of each side, the requests of each class that is to be counted.
        in_turns: the rounds of one number were beside each other.
    """
    times = [
        {name: by_round(side[name], "e2el_ms") for name in asked}
        for side, asked in zip(sides, counts, strict=True)
    ]
    samples = [[np.concatenate(list(one.values())) for one in side.values()] for side in times]
    numbers = [list(asked.values()) for asked in counts]

    def total(numbers: Sequence[int], drawn: Sequence[Any], axis: int) -> Any:
        return sum(n * np.mean(sample, axis=axis) for n, sample in zip(numbers, drawn, strict=True))

    first, second = (float(total(n, drawn, 0)) for n, drawn in zip(numbers, samples, strict=True))
    whole = [set.intersection(*(set(one) for one in side.values())) for side in times]
    if in_turns:
        whole = [whole[0] & whole[1]] * 2
    if min(map(len, whole)) > 1:
        rounds = [
            [float(total(n, [one[number] for one in side.values()], 0)) for number in sorted(kept)]
            for n, side, kept in zip(numbers, times, whole, strict=True)
        ]
        ratio = statistics.ratio_of_rounds(*rounds, in_turns=in_turns)
        return TimeOfAll(first, second, ratio, min(map(len, rounds)))

    def speedup(*drawn: Any, axis: int) -> Any:
        half = len(samples[0])
        return total(numbers[0], drawn[:half], axis) / total(numbers[1], drawn[half:], axis)

    low, high = statistics.bootstrap_interval(
        (*samples[0], *samples[1]), speedup, batch=statistics.BOOTSTRAP_RESAMPLES
    )
    return TimeOfAll(first, second, statistics.Ratio(first / second, low, high), 0)


def _rates(
    shape: tuple[str, int, int],
    first: Mapping[str, Any],
    second: Mapping[str, Any],
    items: Sequence[Rounds],
    in_turns: bool,
) -> list[LatencyRow]:
    """Output tokens and good requests a second of a class whose requests overlap."""
    levels = [row["goodput"] for row in (first, second)]

    def tokens(item: Mapping[str, Any]) -> float:
        return float(item["output_tokens"])

    def good(item: Mapping[str, Any]) -> float:
        return float(item["ttft_ms"] <= levels[0]["ttft_ms"] and item["tpot_ms"] <= levels[0]["tpot_ms"])

    measures = [("output_throughput_tokens_per_s", tokens)] + (
        [("goodput_per_s", good)] if all(levels) else []
    )
    rows = []
    for measure, worth in measures:
        durations = [row["durations_s"] for row in (first, second)]
        # A round in which nothing succeeded has no requests here, and took its time all the same.
        worths = [
            [sum(map(worth, rounds.get(n, ()))) for n in range(len(seconds))]
            for rounds, seconds in zip(items, durations, strict=True)
        ]
        a, b = (sum(w) / sum(d) for w, d in zip(worths, durations, strict=True))
        speedup, interval, rounds = b / a if a else None, None, 0
        mine, theirs = (np.divide(w, d) for w, d in zip(worths, durations, strict=True))
        if min(len(mine), len(theirs)) > 1 and min(mine.min(), theirs.min()) > 0:
            ratio = statistics.ratio_of_rounds(theirs, mine, in_turns=in_turns)
            speedup, interval, rounds = ratio.value, (ratio.low, ratio.high), min(len(mine), len(theirs))
        rows.append(LatencyRow(*shape, measure, a, b, speedup, interval, rounds))
    return rows


def _newest_pair(
    first: Path,
    second: Path,
    kind: str,
    basis: Callable[[store.Record], Mapping[str, Any]],
    command: Callable[[str, store.Record], str],
    where: Callable[[store.Record], bool] = lambda record: True,
) -> tuple[Path, Path]:
    newest = store.latest(first, kind, where), store.latest(second, kind, where)
    others = [(path, store.read(path)) for path in store.records(second, kind)]
    fitting = [
        (record.get("run") != theirs.get("run"), path, other)
        for path in store.records(first, kind)
        if where(record := store.read(path))
        for other, theirs in others
        if basis(record) == basis(theirs)
    ]
    if fitting:
        # Measured in turns, before any pair that is only newer.
        _, path, other = min(fitting, key=lambda found: found[0])
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


def _items_scored(record: store.Record) -> int:
    return sum(row["item_count"] for row in record["tasks"].values())


def _hardware(record: store.Record) -> dict[str, Any]:
    hardware = record["provenance"]["hardware"]
    return {name: hardware[name] for name in ("cpu_model", "cpu_flags", "cpu_count", "gpus")}


def _quality_command(variant: str, like: store.Record) -> str:
    words = [f"python scripts/eval_quality.py --variant {variant} --suite {like['suite']}"]
    if like["limit"] != "deciding":
        words.append("--full" if like["limit"] is None else f"--limit {like['limit']}")
    if like["endpoint"] == "chat":
        words.append("--chat")
    return " ".join(words)


def _latency_command(variant: str, like: store.Record) -> str:
    return f"python scripts/eval_latency.py --variant {variant} --workload {like['workload']}"


def by_task(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The items of a quality record, by task."""
    tasks: dict[str, list[dict[str, Any]]] = {}
    for item in store.read_items(path):
        tasks.setdefault(item["task"], []).append(item)
    return tasks
