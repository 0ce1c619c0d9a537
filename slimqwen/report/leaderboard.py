"""The leaderboard: one row per variant and hardware, from records alone.

A cell shows a figure of one record, or a comparison of two paired records; nothing is averaged here. A record kind
shows up by itself: its verdict in the evidence, its `leaderboard_columns` as columns.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from slimqwen.bench.latency import Latency
from slimqwen.bench.latency.record import ClassFigures
from slimqwen.bench.latency.speedups import (
    ALL_CLASSES,
    Speedup,
    by_class_and_round,
    by_round,
    compare_latency,
    latency_basis,
)
from slimqwen.errors import SlimqwenError
from slimqwen.evals import quality_comparison
from slimqwen.evals.gate import Gate
from slimqwen.evals.quality import Quality, TaskScore
from slimqwen.evals.quality_comparison import TaskComparison
from slimqwen.records import provenance, registry, store
from slimqwen.records.collection import Collection, Problem, StoredRecord
from slimqwen.records.record import Figure, Record
from slimqwen.stats import intervals, verdict

TIMES = {"e2el_ms": "E2EL", "ttft_ms": "TTFT", "tpot_ms": "TPOT"}
"""Latency measures of the leaderboard and their headings."""

DAMAGED = (SlimqwenError, ValueError, TypeError, KeyError)
"""Errors of items that are damaged or from another version."""

_NEEDED = (Quality.kind, Latency.kind, Gate.kind)
"""Kinds of records that a choice rests on; a gate record rests on those of its checks. A baseline needs no gate."""


@dataclass(frozen=True)
class Margins:
    """A gain (loss if negative) in units of the non-inferiority margin, with its 95 % interval."""

    task: str
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Score:
    """One task of a quality record.

    Attributes:
        task: name of the task without the suite's.
        change: change against the baseline on the same items; None if not paired.
    """

    suite: str
    task: str
    row: TaskScore
    change: TaskComparison | None = None

    @property
    def gain(self) -> Margins | None:
        """The change in units of its margin, with a margin of 0 in the measure's own unit; None if not paired."""
        if self.change is None:
            return None
        judgement, value = self.change.judgement, self.change.difference.value
        unit = judgement.margin or 1.0
        gain = value if self.change.higher_is_better else -value
        return Margins(self.task, gain / unit, judgement.low / unit, judgement.high / unit)


@dataclass(frozen=True)
class Evidence:
    """The newest record of a kind.

    Attributes:
        verdict: pass, fail, inconclusive; "measured" for a kind without verdict, "missing" without a record.
        is_stale: whether it is of another checkpoint than the newest quality record.
    """

    kind: str
    verdict: str
    is_stale: bool = False


@dataclass(frozen=True)
class Timing:
    """The newest latency record over the prompt classes on one hardware.

    Attributes:
        baseline: the baseline's record of the same requests on the same hardware; None without one.
        comparison: paired ratios of both records; empty if they were not timed in turns.
        as_scored: whether it is of the same checkpoint as the newest quality record.
    """

    latency: StoredRecord[Latency]
    baseline: StoredRecord[Latency] | None = None
    comparison: tuple[Speedup, ...] = ()
    as_scored: bool = True

    @property
    def classes(self) -> Mapping[str, ClassFigures]:
        """The record's prompt classes by name."""
        return self.latency.record.classes

    @property
    def in_turns(self) -> bool:
        """Whether both records are of one run, in which the servers took turns."""
        return self.baseline is not None and _is_one_run(self.latency, self.baseline)

    @cached_property
    def speed(self) -> Speedup | None:
        """Speed-up over all requests together; None if requests overlapped or were not timed in turns."""
        rows = (row for row in self.comparison if row.prompt_class == ALL_CLASSES and row.speedup)
        return next(rows, None)

    @property
    def is_faster(self) -> bool:
        """Whether the whole interval of the speed-up is above 1."""
        return self.speed is not None and self.speed.interval is not None and self.speed.interval[0] > 1


@dataclass(frozen=True)
class Row:
    """One variant on one hardware.

    Attributes:
        hypothesis: empty if measurements.json cannot be read.
        baseline: name of the baseline; None for a baseline.
        status: planned, measured, promoted or rejected; "unreadable" without measurements.json.
        verdict: verdict in measurements.json; None without one.
        hardware: hardware of the latency record, else of the quality record; empty without a record.
        timed: None if not timed on this hardware.
        figures: figures of the kinds' leaderboard columns by column heading, with their records.
        size_bytes: size of the checkpoint that was measured last.
        evidence: newest record of each kind in experiments/.
        fronts: costs at which the row is on the Pareto front.
    """

    variant: str
    hypothesis: str
    baseline: str | None
    status: str
    verdict: str | None
    hardware: str
    on_cpu: bool
    scores: Mapping[tuple[str, str], Score]
    timed: Timing | None
    figures: Mapping[str, tuple[Figure, StoredRecord[Record]]]
    size_bytes: int | None
    evidence: tuple[Evidence, ...]
    newest: StoredRecord[Record] | None
    fronts: tuple[str, ...] = ()

    @property
    def group(self) -> tuple[str, str]:
        """Baseline and hardware: rows of one group may be compared."""
        return self.baseline or self.variant, self.hardware

    @property
    def is_measured(self) -> bool:
        """Whether there is evidence: a record in experiments/."""
        return any(evidence.verdict != "missing" for evidence in self.evidence)

    @property
    def suites(self) -> list[str]:
        """Suites with a score."""
        return sorted({suite for suite, _ in self.scores})

    @property
    def standing(self) -> str:
        """What a person decided, else the verdict, else the status."""
        return self.status if self.status in ("promoted", "rejected") else self.verdict or self.status

    @cached_property
    def worst(self) -> Margins | None:
        """The task whose interval reaches furthest down, which decides; None if nothing is paired."""
        gains = [score.gain for score in self.scores.values() if score.gain]
        return min(gains, key=lambda gain: gain.low, default=None)

    @property
    def passed_quality(self) -> bool:
        """Whether every paired task of the newest checkpoint passes."""
        return any((evidence.kind, evidence.verdict) == (Quality.kind, "pass") for evidence in self.evidence)

    @property
    def doubts(self) -> list[str]:
        """Where the newest records contradict or weaken the claimed verdict."""
        current = [evidence for evidence in self.evidence if not evidence.is_stale]
        doubts = [
            f"its newest {evidence.kind.replace('_', ' ')} record fails"
            for evidence in current
            if evidence.verdict == "fail"
        ]
        if self.verdict == "pass":
            doubts += [
                f"its newest {evidence.kind.replace('_', ' ')} record is inconclusive"
                for evidence in current
                if evidence.verdict == "inconclusive"
            ]
        if self.timed and not self.timed.as_scored:
            doubts.append("latency and quality are of different checkpoints")
        return doubts

    @property
    def missing(self) -> list[str]:
        """Kinds that a choice needs and that are missing or of an earlier checkpoint."""
        needed = _NEEDED if self.baseline else _NEEDED[:2]
        return [
            evidence.kind
            for evidence in self.evidence
            if evidence.kind in needed and (evidence.verdict == "missing" or evidence.is_stale)
        ]


_Problems = dict[str, str]
"""Reasons by location for items that cannot be used."""


def rows_of(collection: Collection, variant: str) -> tuple[list[Row], list[Problem]]:
    """Rows of one variant: one per hardware with latency records, one without times otherwise.

    Returns:
        The rows, and the records whose items cannot be used.
    """
    problems: _Problems = {}
    claims = collection.measurements.get(variant)
    baseline = claims.baseline if claims else None
    records = sorted(
        (entry for entry in collection.records if entry.variant == variant),
        key=lambda entry: entry.ended,
        reverse=True,
    )
    scored = next(iter(collection.select(Quality, variant)), None)
    digest = _digest(scored) if scored else None
    scores = _scores(collection, variant, baseline, problems)
    changes = [score.change.judgement.verdict for score in scores.values() if score.change]
    paired_verdicts = {Quality.kind: str(verdict.overall(changes))} if changes else {}
    timed: dict[str, StoredRecord[Latency]] = {}
    for entry in collection.select(Latency, variant):
        if entry.record.workload == "classes":
            timed.setdefault(hardware(entry), entry)
    machines = list(timed) or [hardware(entry) for entry in (scored, *records) if entry][:1] or [""]
    checkpoints = (entry.record.provenance.checkpoint for entry in records)
    sizes = [checkpoint.size_bytes for checkpoint in checkpoints if checkpoint]
    rows = []
    for machine in machines:
        rows.append(
            Row(
                variant=variant,
                hypothesis=claims.hypothesis if claims else "",
                baseline=baseline,
                status=claims.status if claims else "unreadable",
                verdict=claims.verdict if claims else None,
                hardware=machine,
                on_cpu=any(
                    hardware(entry) == machine and not entry.record.provenance.hardware.gpus
                    for entry in records
                ),
                scores=scores,
                timed=_timed(collection, timed.get(machine), baseline, digest, problems),
                figures=_figures(collection, variant, machine),
                size_bytes=next(filter(None, sizes), None),
                evidence=tuple(_evidence(collection, variant, digest, paired_verdicts)),
                newest=next(iter(records), None),
            )
        )
    return rows, [Problem(location, reason) for location, reason in problems.items()]


def hardware(entry: StoredRecord[Record]) -> str:
    """Hardware that a record was measured on."""
    return provenance.hardware_name(entry.record.provenance.hardware)


def median_interval(entry: StoredRecord[Record], prompt_class: str, measure: str) -> tuple[float, float]:
    """95 % interval of a class's median in a latency record, from its items.

    Raises:
        RecordError: the items are damaged.
        TooFewItemsError: no request succeeded.
    """
    rounds = by_class_and_round(requests(entry, prompt_class)).get(prompt_class, {})
    return intervals.median_interval(by_round(rounds, measure))


def requests(entry: StoredRecord[Record], prompt_class: str) -> list[Mapping[str, Any]]:
    """Successful requests of a class in a latency record.

    Raises:
        RecordError: the items are damaged.
    """
    return [item for item in _items(entry.path) if item["class"] == prompt_class and item["error"] is None]


def _has_items(entry: StoredRecord[Record], problems: _Problems) -> bool:
    """Whether a record has items; damaged ones are none, and become a problem."""
    try:
        return bool(_items(entry.path))
    except DAMAGED as error:
        problems[entry.location] = f"its items cannot be used: {error}"
        return False


@cache
def _items(path: Path) -> tuple[Mapping[str, Any], ...]:
    return tuple(store.read_items(path))


def _digest(entry: StoredRecord[Record]) -> str | None:
    return entry.record.provenance.checkpoint_digest


def _is_one_run(first: StoredRecord[Latency], second: StoredRecord[Latency]) -> bool:
    return first.record.run == second.record.run


def _figures(
    collection: Collection, variant: str, machine: str
) -> dict[str, tuple[Figure, StoredRecord[Record]]]:
    """Figures of the kinds' columns, of the newest record on this hardware, else on any."""
    figures = {}
    for kind in registry.kinds().values():
        if kind.leaderboard_columns and (records := collection.select(kind, variant)):
            entry = min(records, key=lambda entry: hardware(entry) != machine)
            values = entry.record.figures()
            for name, heading in kind.leaderboard_columns.items():
                if name in values:
                    figures[heading] = values[name], entry
    return figures


def _evidence(
    collection: Collection, variant: str, digest: str | None, paired_verdicts: Mapping[str, str]
) -> Iterable[Evidence]:
    """The newest record of each kind, with its paired verdict (by kind) where it has one."""
    for kind, model in registry.kinds().items():
        if model.folder != "experiments":
            continue
        entry = next(iter(collection.select(model, variant)), None)
        if entry is None:
            yield Evidence(kind, "missing")
            continue
        outcome = paired_verdicts.get(kind) or entry.record.outcome or "measured"
        yield Evidence(kind, outcome, digest is not None and _digest(entry) != digest)


def _scores(
    collection: Collection, variant: str, baseline: str | None, problems: _Problems
) -> dict[tuple[str, str], Score]:
    """Scores by suite: of the pair that `quality_comparison.best_pair` chooses, else of the record on most items."""
    variant_records, baseline_records = (
        quality_comparison.of_newest_checkpoint(collection.select(Quality, name) if name else ())
        for name in (variant, baseline)
    )
    scores: dict[tuple[str, str], Score] = {}
    for suite in sorted({entry.record.suite for entry in variant_records}):
        suite_records = [entry for entry in variant_records if entry.record.suite == suite]
        pair = quality_comparison.best_pair(baseline_records, suite_records)
        changes = _changes(*pair, problems) if pair else {}
        shown = pair[1] if pair else quality_comparison.widest(suite_records)
        for task, row in shown.record.tasks.items() if shown else ():
            name = task.removeprefix(f"{suite}_")
            scores[suite, name] = Score(suite, name, row, changes.get(task))
    return scores


def _changes(
    first: StoredRecord[Quality], second: StoredRecord[Quality], problems: _Problems
) -> dict[str, TaskComparison]:
    """Paired changes by task, second minus first; empty if items are damaged."""
    if not (_has_items(first, problems) and _has_items(second, problems)):
        return {}
    try:
        return {row.task: row for row in quality_comparison.compare(first.path, second.path)}
    except DAMAGED as error:
        problems[second.location] = f"not paired with {first.location}: {error}"
        return {}


def _timed(
    collection: Collection,
    entry: StoredRecord[Latency] | None,
    baseline: str | None,
    digest: str | None,
    problems: _Problems,
) -> Timing | None:
    if entry is None:
        return None
    basis = latency_basis(entry.record)
    candidates = [
        other
        for other in (collection.select(Latency, baseline) if baseline else ())
        if other.record.workload == "classes" and latency_basis(other.record) == basis
    ]
    # A record measured in turns with this one goes before a newer one.
    baseline_entry = min(candidates, key=lambda other: not _is_one_run(entry, other), default=None)
    timed = Timing(entry, baseline_entry, as_scored=digest is None or _digest(entry) == digest)
    if baseline_entry is None or not timed.in_turns:
        return timed
    if not (_has_items(entry, problems) and _has_items(baseline_entry, problems)):
        return timed
    try:
        return replace(timed, comparison=tuple(compare_latency(baseline_entry.path, entry.path)))
    except DAMAGED as error:
        problems[entry.location] = f"its items give no speed-up: {error!r}"
        return timed
