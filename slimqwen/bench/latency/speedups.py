"""Comparison of two latency records: finds records that fit, and computes the speed-up of the second over the first.

Every ratio of two latency records is computed here, for each class and measure. Rounds of variants that were measured
in turns are paired by their number; if a side has a single round, the interval is over requests.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from slimqwen.bench.latency.record import ClassFigures, Latency
from slimqwen.errors import SlimqwenError
from slimqwen.identity.effects import Effect, affecting
from slimqwen.records import store
from slimqwen.records.pairing import newest_pair, require_quiet, require_same
from slimqwen.stats import intervals, multiplicity
from slimqwen.stats.estimates import CONFIDENCE_LEVEL, Ratio

ALL_CLASSES = "all classes"
LATENCY_MEASURES = ("ttft_ms", "tpot_ms", "e2el_ms")

Rounds = Mapping[int, Sequence[Mapping[str, Any]]]
"""The successful requests of a class, by the number of the round."""


@dataclass(frozen=True)
class Speedup:
    """Speed-up of the second variant over the first, in one measure of one class.

    Attributes:
        prompt_class: name of the class, or `ALL_CLASSES`.
        prompt_tokens: length of a prompt, tokens; None for all classes.
        output_tokens: length of an output, tokens; None for all classes.
        measure: a median time in milliseconds (`wall_ms`: a sum), or a rate per second.
        first: figure of the first variant (of the baseline, if one of the two is), over all its requests.
        second: figure of the second variant, over all its requests.
        speedup: above 1 if the second is better. Times: first over second; rates: second over first. With several
            rounds it is the ratio of the geometric means of the rounds' figures, so it differs from the ratio of
            `first` and `second`. None if the first figure is 0.
        interval: interval of the speed-up, which holds at 95 % for all timings in turns of the pair together
            (`multiplicity.confidence_of_try`); None if neither rounds nor requests give one.
        rounds: number of rounds that the interval is over; 0 for an interval over requests.
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

    @property
    def ratio(self) -> str:
        """The speed-up and its interval as text, such as "1.71x [1.21, 2.42]"."""
        interval = " [{:.2f}, {:.2f}]".format(*self.interval) if self.interval else ""
        return f"{self.speedup or 0:.2f}x{interval}"

    def __str__(self) -> str:
        return f"{self.prompt_class} {self.ratio}"


def latency_pair(first: Path, second: Path, workload: str) -> tuple[Path, Path]:
    """Find the newest latency records of two variants that had the same requests on the same hardware.

    Args:
        first: folder of the first variant's records, experiments/<variant>.
        second: folder of the second variant's records.
        workload: name of the workload.

    Raises:
        MissingRecordError: a variant has no latency record of the workload.
        NotComparableError: lengths, arrivals or hardware differ in every pair.
    """

    def fits(record: Latency) -> bool:
        return record.workload == workload

    return newest_pair(first, second, Latency, _command, fits)


def shared_workloads(first: Path, second: Path) -> list[str]:
    """Names of the workloads for which both variants have latency records, `classes` first.

    Records of a busy host do not count, because they are never compared.

    Args:
        first: folder of the first variant's records, experiments/<variant>.
        second: folder of the second variant's records.

    Raises:
        MissingRecordError: a variant has no latency record.
        NotComparableError: the variants share no workload.
    """
    try:
        newest = store.latest(first, Latency), store.latest(second, Latency)
    except store.MissingRecordError:
        raise store.MissingRecordError(
            f"{second.name} was not timed in turns with {first.name}; run `{_command_in_turns(first, second)}`"
        ) from None
    workloads = [
        {
            record.workload
            for path in store.records(folder, Latency)
            if not (record := store.read_record(path, Latency)).provenance.host_was_busy
        }
        for folder in (first, second)
    ]
    shared = sorted(workloads[0] & workloads[1], key=lambda name: (name != "classes", name))
    if not shared:
        a, b = (store.read_record(path, Latency) for path in newest)
        require_same(*newest, a.basis, b.basis, _command(b.variant, a))
    return shared


def compare_latency(first: Path, second: Path) -> list[Speedup]:
    """Compute the speed-ups of one record over another: median times and rates by class, and the time of all classes.

    Each further timing of the pair in turns widens the intervals, so that they hold for all its timings together.

    Args:
        first: file of the latency record that is the base of the ratios.
        second: file of the record whose speed-up is computed.

    Raises:
        NotComparableError: requests or hardware differ, or the host was busy.
        RecordError: a record or its items are damaged.
    """
    a, b = store.read_record(first, Latency), store.read_record(second, Latency)
    require_quiet(a, b)
    require_same(first, second, a.basis, b.basis, _command(b.variant, a))
    level = CONFIDENCE_LEVEL
    if a.run == b.run:
        level = multiplicity.confidence_of_try(count_tries(first, second))
    sides = [by_class_and_round(store.read_items(path)) for path in (first, second)]
    return class_speedups((a, b), sides, level)


def count_tries(first: Path, second: Path) -> int:
    """Count how often this pair has been timed in turns with the same settings, up to these two records; at least 1.

    Settings are workload, lengths, hardware, flags of the second variant, and recipes of both checkpoints. Timings on a
    busy host do not count, because no speed-up is made from them; nor do deleted or damaged records.

    Args:
        first, second: files of the two latency records.
    """
    a, b = store.read_record(first, Latency), store.read_record(second, Latency)
    runs = {b.run}
    for path in store.records(second.parent, Latency):
        with contextlib.suppress(store.RecordError):
            other = store.read_record(path, Latency)
            is_earlier = path.name < second.name and a.variant in other.interleaved_with
            if is_earlier and not other.provenance.host_was_busy and _is_timed_alike(other, b):
                beside = [store.read_record(each, Latency) for each in store.records(first.parent, Latency)]
                if all(each.run != other.run or _has_recipe_of(each, a) for each in beside):
                    runs.add(other.run)
    return len(runs)


def _is_timed_alike(other: Latency, record: Latency) -> bool:
    flags = [affecting(Effect.FIGURES, each.provenance.flags) for each in (other, record)]
    return other.basis == record.basis and flags[0] == flags[1] and _has_recipe_of(other, record)


def _has_recipe_of(other: Latency, record: Latency) -> bool:
    return other.provenance.checkpoint.has_recipe_of(record.provenance.checkpoint)


def class_speedups(
    records: tuple[Latency, Latency], sides: Sequence[Mapping[str, Rounds]], level: float
) -> list[Speedup]:
    """Speed-ups of the second of two records over the first, for each class of which both have requests.

    Args:
        records: the two records.
        sides: successful requests of each record, by class and round.
        level: confidence level of the intervals, such as 0.95.
    """
    a, b = records
    form = _Form(in_turns=a.run == b.run, level=level)
    rows = []
    for name, figures in a.classes.items():
        if not all(side.get(name) for side in sides) or name not in b.classes:
            continue
        pair = figures, b.classes[name]
        rounds = sides[0][name], sides[1][name]
        rows += [_time(name, measure, pair, rounds, form) for measure in LATENCY_MEASURES]
        if figures.concurrency != 1 and figures.durations_s:
            rows += _rates(name, pair, rounds, form)
    return [*rows, *_all_classes((a, b), sides, level)]


def by_class_and_round(items: Sequence[Mapping[str, Any]]) -> dict[str, Rounds]:
    """Group the successful requests among a latency record's items: class -> number of the round -> requests."""
    classes: dict[str, dict[int, list[Mapping[str, Any]]]] = {}
    for item in items:
        if item["error"] is None:
            classes.setdefault(item["class"], {}).setdefault(item.get("round", 0), []).append(item)
    return dict(classes)


def by_round(rounds: Rounds, measure: str) -> dict[int, list[float]]:
    """Values of one measure for every request of a class, by round."""
    return {number: [float(request[measure]) for request in requests] for number, requests in rounds.items()}


class _Form(TypedDict):
    """What the interval of a ratio depends on beside the figures."""

    in_turns: bool
    level: float


def _time(
    name: str, measure: str, pair: tuple[ClassFigures, ClassFigures], rounds: Sequence[Rounds], form: _Form
) -> Speedup:
    ratio, count = intervals.ratio_by_round(*(by_round(side, measure) for side in rounds), **form)
    first, second = (getattr(figures, measure).median for figures in pair)
    shape = name, pair[0].prompt_tokens, pair[0].output_tokens
    return Speedup(*shape, measure, first, second, ratio.value, (ratio.low, ratio.high), count)


def _rates(
    name: str, pair: tuple[ClassFigures, ClassFigures], rounds: Sequence[Rounds], form: _Form
) -> list[Speedup]:
    """Speed-ups in output tokens and good requests per second, for a class whose requests overlap.

    With a single round, or a round without success, there is no interval: requests that overlap depend on each other.
    """
    measures: list[tuple[str, Callable[[Mapping[str, Any]], float]]] = [
        ("output_throughput_tokens_per_s", lambda request: float(request["output_tokens"]))
    ]
    level = pair[0].goodput
    if level and pair[1].goodput:
        measures.append(("goodput_per_s", level.service_level.is_met_by))
    rows = []
    for measure, amount in measures:
        means, rates = [], []
        for side, figures in zip(rounds, pair, strict=True):
            durations = figures.durations_s or ()
            # A round without a success has no requests in `rounds`, but its duration counts.
            amounts = [sum(map(amount, side.get(number, ()))) for number in range(len(durations))]
            means.append(sum(amounts) / sum(durations))
            rates.append([n / seconds for n, seconds in zip(amounts, durations, strict=True)])
        first, second = means
        speedup, interval, count = second / first if first else None, None, min(map(len, rates))
        if count > 1 and min(*rates[0], *rates[1]) > 0:
            ratio = intervals.ratio_of_rounds(rates[1], rates[0], **form)
            speedup, interval = ratio.value, (ratio.low, ratio.high)
        shape = name, pair[0].prompt_tokens, pair[0].output_tokens
        rows.append(Speedup(*shape, measure, first, second, speedup, interval, count if interval else 0))
    return rows


def _all_classes(
    records: tuple[Latency, Latency], sides: Sequence[Mapping[str, Rounds]], level: float
) -> list[Speedup]:
    """Speed-up over all classes; empty if requests overlapped or a class has no success on a side."""
    figures = [row for record in records for row in record.classes.values()]
    if any(row.concurrency != 1 for row in figures) or any(
        name not in side for name in records[0].classes for side in sides
    ):
        return []
    in_turns = records[0].run == records[1].run
    times = [
        [by_round(side[name], "e2el_ms") for name in record.classes]
        for record, side in zip(records, sides, strict=True)
    ]
    samples = [[np.concatenate(list(rounds.values())) for rounds in side] for side in times]

    def total(side: int, samples: Sequence[Any], axis: int = 0) -> Any:
        # A failed request counts with the mean time of its class.
        counts = [row.request_count for row in records[side].classes.values()]
        return sum(n * np.mean(sample, axis=axis) for n, sample in zip(counts, samples, strict=True))

    def ratio_of_totals(*resampled: Any, axis: int) -> Any:
        half = len(samples[0])
        return total(0, resampled[:half], axis) / total(1, resampled[half:], axis)

    first, second = (float(total(side, samples[side])) for side in (0, 1))
    complete = [set.intersection(*map(set, side)) for side in times]  # rounds with a success in every class
    if in_turns:
        complete = [complete[0] & complete[1]] * 2
    count = min(map(len, complete))
    if count > 1:
        totals = [
            [total(side, [rounds[number] for rounds in times[side]]) for number in sorted(complete[side])]
            for side in (0, 1)
        ]
        ratio = intervals.ratio_of_rounds(*totals, in_turns=in_turns, level=level)
    else:
        count = 0
        low, high = intervals.bootstrap_interval(
            (*samples[0], *samples[1]), ratio_of_totals, batch=intervals.BOOTSTRAP_RESAMPLES, level=level
        )
        ratio = Ratio(first / second, low, high)
    interval = ratio.low, ratio.high
    return [Speedup(ALL_CLASSES, None, None, "wall_ms", first, second, ratio.value, interval, count)]


def _command_in_turns(first: Path, second: Path) -> str:
    """The command that times two variants in turns, from their folders of records."""
    try:
        is_baseline = store.read_measurements(second).baseline == first.name
    except SlimqwenError:  # another folder of records than experiments/ has no measurements.json
        is_baseline = True
    sides = f"{second.name} --baseline" if is_baseline else f"--variant {first.name} --variant {second.name}"
    return f"slimqwen bench latency {sides}"


def _command(variant: str, record: Latency) -> str:
    return f"slimqwen bench latency --variant {variant} --workload {record.workload}"
