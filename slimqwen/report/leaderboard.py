"""The leaderboard: what the records say of every variant, a row a variant and the hardware it was timed on.

Nothing is measured or averaged here: a cell is a figure of one record, or of two that were paired by item.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from statistics import median
from typing import Any

from slimqwen.errors import SlimqwenError
from slimqwen.evaluation import comparison, statistics, verdict
from slimqwen.records import provenance, store
from slimqwen.records.collection import Collection, Found, Problem

CPU_NOTE = "Measured on a CPU: no CPU figure is evidence about a GPU."

WITNESSES = ("quality", "fidelity", "acceptance", "engine", "gate", "latency", "start_up")
"""The kinds of records that a choice rests on, in the order in which they are shown."""

MADE_BY = {
    "quality": "make eval-quality VARIANT={}",
    "fidelity": "make eval-fidelity VARIANT={}",
    "acceptance": "make sweep-k VARIANT={}",
    "engine": "make check-engine VARIANT={}",
    "gate": "make gate VARIANT={}",
    "latency": "make eval-latency VARIANT={} BASELINE=1",
    "start_up": "make eval-startup VARIANT={}",
}
"""The command that makes a kind of record."""

_START_KINDS = ("baked", "eager", "cold")
"""How a served variant starts: from what its recipe baked, else as it can."""


@dataclass(frozen=True)
class Score:
    """One task of a quality record.

    Attributes:
        suite: that the task is of.
        task: without the suite's name before it.
        row: what the record says of it.
        change: against the baseline on the same items; None where the two were not paired.
    """

    suite: str
    task: str
    row: Mapping[str, Any]
    change: comparison.QualityRow | None = None


@dataclass(frozen=True)
class Margins:
    """A gain, or a loss where negative, in units of the margin: -1 is the loss that still counts as equal."""

    task: str
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Witness:
    """What the newest record of a kind says.

    Attributes:
        kind: of the record.
        says: pass, fail, inconclusive; "measured" where a kind gives no verdict, "missing" without a record.
        stale: the record is of another checkpoint than the one that was scored last.
    """

    kind: str
    says: str
    stale: bool = False


@dataclass(frozen=True)
class Timed:
    """Medians of a latency record over the prompt classes.

    Attributes:
        found: the record.
        against: the baseline's record of the same requests and hardware; None where there is none.
        speed: of all requests together against the baseline's, with its interval; None where requests overlapped, or
            the servers did not take turns in one run: what else was different then, nobody knows.
        as_scored: whether it is of the checkpoint that was scored last.
    """

    found: Found
    against: Found | None
    speed: comparison.LatencyRow | None = None
    as_scored: bool = True

    @cached_property
    def speedups(self) -> Mapping[str, float]:
        """Ratios of median E2EL by class, baseline over variant; none where the servers did not take turns."""
        if self.against is None or self.speed is None:
            return {}
        theirs = self.against.record["classes"]
        medians = {
            name: (theirs[name]["e2el_ms"]["median"], of["e2el_ms"]["median"])
            for name, of in self.classes.items()
        }
        return {name: first / second for name, (first, second) in medians.items() if first and second}

    @property
    def classes(self) -> Mapping[str, Mapping[str, Any]]:
        """The record's classes."""
        found: Mapping[str, Mapping[str, Any]] = self.found.record["classes"]
        return found

    @property
    def in_turns(self) -> bool:
        """Whether the two records are of one run, in which the servers took turns."""
        return self.against is not None and self.found.record["run"] == self.against.record["run"]

    @property
    def is_faster(self) -> bool:
        """Whether the whole interval of the speed-up lies above 1."""
        return self.speed is not None and self.speed.interval is not None and self.speed.interval[0] > 1


@dataclass(frozen=True)
class StartUp:
    """Seconds until ready of the way in which the variant starts: median, fastest and slowest."""

    kind: str
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """One variant on one kind of hardware.

    Attributes:
        variant: its name.
        hypothesis: empty where measurements.json cannot be read.
        baseline: None for a baseline.
        status: planned, measured, promoted, rejected; "unreadable" where measurements.json cannot be read.
        verdict: what measurements.json claims; None until a comparison has given one.
        hardware: that the times are of, else the scores; empty without a record.
        on_cpu: whether that is a CPU.
        scores: by suite and task.
        worst: the task whose interval reaches the furthest down, in margins; None without a paired record.
        timed: the newest latency record over the prompt classes on this hardware.
        acceptance: of the newest acceptance record, the depth and the estimate at it.
        size_bytes: of the checkpoint that was measured last.
        start_up: None where starts were not timed on this hardware.
        witnesses: one of each of `WITNESSES`.
        newest: the newest record of the variant.
        fronts: the costs at which no variant of the same baseline and hardware is as good in quality and in cost.
    """

    variant: str
    hypothesis: str
    baseline: str | None
    status: str
    verdict: str | None
    hardware: str
    on_cpu: bool
    scores: Mapping[tuple[str, str], Score]
    worst: Margins | None
    timed: Timed | None
    acceptance: tuple[int, Mapping[str, Any]] | None
    size_bytes: int | None
    start_up: StartUp | None
    witnesses: tuple[Witness, ...]
    newest: Found | None
    fronts: tuple[str, ...] = ()

    @property
    def group(self) -> tuple[str, str]:
        """What it may be compared within: the baseline's name and the hardware."""
        return self.baseline or self.variant, self.hardware

    @property
    def suites(self) -> list[str]:
        """That it was scored on."""
        return sorted({suite for suite, _ in self.scores})

    @property
    def stands(self) -> str:
        """What a person decided, else the verdict, else the status: what a README's table says too."""
        return self.status if self.status in ("promoted", "rejected") else self.verdict or self.status

    @property
    def doubts(self) -> list[str]:
        """What its newest records say against it, or less than it claims."""
        said = [one for one in self.witnesses if one.says == "fail" and not one.stale]
        doubts = [f"its newest {one.kind.replace('_', ' ')} record says fail" for one in said]
        if self.verdict == "pass":
            unsure = [one for one in self.witnesses if one.says == "inconclusive" and not one.stale]
            doubts += [f"its newest {one.kind.replace('_', ' ')} record is inconclusive" for one in unsure]
        if self.timed and not self.timed.as_scored:
            doubts.append("it was timed with another checkpoint than it was scored with")
        return doubts

    @property
    def missing(self) -> list[str]:
        """The kinds of records that it lacks of the checkpoint scored last; a baseline needs no judging."""
        needed = ("quality", "latency") if self.baseline is None else WITNESSES
        return [
            one.kind for one in self.witnesses if one.kind in needed and (one.says == "missing" or one.stale)
        ]


@dataclass(frozen=True)
class Point:
    """A row in a plane of cost and quality; intervals at 95 %, of starts the fastest and the slowest."""

    variant: str
    stands: str
    cost: float
    cost_low: float
    cost_high: float
    quality: Margins
    on_front: bool = False


@dataclass(frozen=True)
class Front:
    """Quality against one cost, among variants of one baseline on one kind of hardware.

    Attributes:
        baseline: that all are held against; it stands at 0.
        hardware: that they were measured on.
        cost: its name in a few words.
        axis: its name, with the unit.
        points: the baseline among them, the cheapest first.
    """

    baseline: str
    hardware: str
    on_cpu: bool
    cost: str
    axis: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Choice:
    """Which variant of a baseline to serve on a kind of hardware, as far as the records say.

    Attributes:
        baseline: of all of them.
        hardware: that they were measured on.
        serve: the row to serve; None where no variant has passed, in quality too, and was faster beyond its interval.
        runners_up: other rows with records, the most promising first.
    """

    baseline: str
    hardware: str
    on_cpu: bool
    serve: Row | None
    runners_up: tuple[Row, ...]


@dataclass(frozen=True)
class Board:
    """All rows and what follows from them."""

    rows: tuple[Row, ...]
    fronts: tuple[Front, ...]
    choices: tuple[Choice, ...]

    @property
    def tasks(self) -> list[tuple[str, str]]:
        """Suites and tasks in the order in which records have them."""
        return list(dict.fromkeys(key for row in self.rows for key in row.scores))

    @property
    def classes(self) -> list[str]:
        """The prompt classes that were timed, in the order in which records have them."""
        return list(dict.fromkeys(name for row in self.rows if row.timed for name in row.timed.classes))


@dataclass
class _Reading:
    """Items read once, and those that cannot be."""

    problems: dict[str, str] = field(default_factory=dict)

    def items(self, found: Found) -> Sequence[Mapping[str, Any]]:
        """A record's items; none, and the reason noted, where they are damaged."""
        try:
            return _items(found.path)
        except (SlimqwenError, ValueError, TypeError) as error:
            self.problems[found.place] = f"its items cannot be used: {error}"
            return ()


def assemble(rows: Sequence[Row]) -> Board:
    """Rows -> the board, the most promising first: who is on which front, and which to serve."""
    found, fronts = _fronts(rows)
    order = {"promoted": 0, "pass": 1, "inconclusive": 2, "measured": 3, "fail": 4, "rejected": 5}
    ordered = sorted(
        found, key=lambda row: (order.get(row.stands, 6), -_speed(row), row.variant, row.hardware)
    )
    return Board(tuple(ordered), tuple(fronts), tuple(_choices(ordered)))


def rows_of(collection: Collection, name: str) -> tuple[list[Row], list[Problem]]:
    """The rows of one variant: one for each hardware that it was timed on, one without times else.

    Returns:
        the rows, and the records whose items cannot be used.
    """
    reading = _Reading()
    claims = collection.measurements.get(name)
    baseline = claims["baseline"] if claims else None
    records = [one for kind in WITNESSES for one in collection.of(name, kind)]
    scored = next(iter(collection.of(name, "quality")), None)
    digest = _digest(scored) if scored else None
    scores = _scores(collection, name, baseline, reading)
    newest = max(records, key=lambda one: str(one.record["provenance"]["ended"]), default=None)
    sized = [one for one in records if isinstance(one.record["provenance"]["checkpoint"], Mapping)]
    latest = max(sized, key=lambda one: str(one.record["provenance"]["ended"]), default=None)
    timed = _by_hardware(one for one in collection.of(name, "latency") if one.record["workload"] == "classes")
    started = _by_hardware(collection.of(name, "start_up"))
    places = list(dict.fromkeys([*timed, *started])) or ([hardware(scored)] if scored else [])
    if not places:
        places = [hardware(newest)] if newest else [""]
    rows = []
    for place in places:
        times = _timed(collection, timed.get(place), baseline, reading)
        if times is not None and digest is not None:
            times = replace(times, as_scored=_digest(times.found) == digest)
        rows.append(
            Row(
                variant=name,
                hypothesis=claims["hypothesis"] if claims else "",
                baseline=baseline,
                status=claims["status"] if claims else "unreadable",
                verdict=claims["verdict"] if claims else None,
                hardware=place,
                on_cpu=any(hardware(one) == place and is_cpu(one) for one in records),
                scores=scores,
                worst=worst(scores.values()),
                timed=times,
                acceptance=_acceptance(next(iter(collection.of(name, "acceptance")), None)),
                size_bytes=latest.record["provenance"]["checkpoint"]["size_bytes"] if latest else None,
                start_up=_start_up(started.get(place)),
                witnesses=tuple(
                    _witness(kind, collection.of(name, kind), digest, scores.values()) for kind in WITNESSES
                ),
                newest=newest,
            )
        )
    return rows, [Problem(place, reason) for place, reason in reading.problems.items()]


def hardware(found: Found) -> str:
    """What a record was measured on, in the words of the tables."""
    return provenance.hardware_name(found.record["provenance"]["hardware"])


def is_cpu(found: Found) -> bool:
    """Whether a record was measured without a GPU."""
    return not found.record["provenance"]["hardware"]["gpus"]


def in_margins(row: comparison.QualityRow) -> Margins:
    """A paired change as a gain in units of its margin; of a margin of nothing, in the measure's own unit."""
    unit = row.judgement.margin or 1.0
    gain = row.difference.value if row.higher_is_better else -row.difference.value
    return Margins(row.task, gain / unit, row.judgement.low / unit, row.judgement.high / unit)


def worst(scores: Iterable[Score]) -> Margins | None:
    """The task whose interval reaches the furthest down: the one that decides."""
    changes = [replace(in_margins(score.change), task=score.task) for score in scores if score.change]
    return min(changes, key=lambda one: one.low, default=None)


def median_interval(found: Found, name: str, measure: str) -> tuple[float, float]:
    """The 95 % interval of the median of a class of a latency record, from its items (`statistics.median_interval`).

    Raises:
        RecordError: the items are damaged.
        TooFewItemsError: no request succeeded.
    """
    rounds = comparison.by_class_and_round(items_of_class(found, name)).get(name, {})
    return statistics.median_interval(comparison.by_round(rounds, measure))


def items_of_class(found: Found, name: str) -> list[Mapping[str, Any]]:
    """The requests of a class of a latency record that succeeded.

    Raises:
        RecordError: the items are damaged.
    """
    return [item for item in _items(found.path) if item["class"] == name and item["error"] is None]


def pareto(points: Sequence[Point]) -> list[Point]:
    """The points, cheapest first, each with whether no other is as good in both and better in one."""
    ordered = sorted(points, key=lambda one: (one.cost, -one.quality.value, one.variant))
    marked = []
    best = -math.inf
    best_cost = math.nan
    for one in ordered:
        equal = one.quality.value == best and one.cost == best_cost
        on_front = one.quality.value > best or equal
        marked.append(replace(one, on_front=on_front))
        if on_front:
            best, best_cost = one.quality.value, one.cost
    return marked


def pair(
    ours: Sequence[Found], theirs: Sequence[Found], basis: Callable[[store.Record], Mapping[str, Any]]
) -> tuple[Found, Found] | None:
    """The newest record of the first's, given newest first, and the newest of the second's made alike; None if none."""
    bases = [(one, basis(one.record)) for one in theirs]
    for one in ours:
        own = basis(one.record)
        for other, its in bases:
            if own == its:
                return one, other
    return None


@cache
def _items(path: Path) -> tuple[Mapping[str, Any], ...]:
    return tuple(store.read_items(path))


def _digest(found: Found) -> str:
    of = found.record["provenance"]["checkpoint"]
    return str(of["digest"] if isinstance(of, Mapping) else of)


def _by_hardware(records: Iterable[Found]) -> dict[str, Found]:
    """The first of each kind of hardware."""
    newest: dict[str, Found] = {}
    for one in records:
        newest.setdefault(hardware(one), one)
    return newest


def _of_last_checkpoint(records: Sequence[Found]) -> list[Found]:
    """The quality records of the checkpoint that was scored last."""
    return [one for one in records if _digest(one) == _digest(records[0])]


def _scores(
    collection: Collection, name: str, baseline: str | None, reading: _Reading
) -> dict[tuple[str, str], Score]:
    """By suite, the pair that `comparison.quality_pair` chooses; else the widest."""
    ours = _of_last_checkpoint(collection.of(name, "quality"))
    theirs = _of_last_checkpoint(collection.of(baseline, "quality")) if baseline else []
    found: dict[tuple[str, str], Score] = {}
    for suite in sorted({one.record["suite"] for one in ours}):
        mine = [one for one in ours if one.record["suite"] == suite]
        pairs = [
            (
                comparison.pair_weight(first.record, second.record),
                first.path.name,
                second.path.name,
                first,
                second,
            )
            for second in mine
            for first in theirs
            if comparison.quality_basis(first.record) == comparison.quality_basis(second.record)
        ]
        shown = max(mine, key=lambda one: (comparison.coverage(one.record), one.path.name))
        changes: dict[str, comparison.QualityRow] = {}
        if pairs:
            *_, first, shown = max(pairs, key=lambda one: one[:3])
            changes = _changes(first, shown, reading)
        for task, row in shown.record["tasks"].items():
            short = task.removeprefix(f"{suite}_")
            found[suite, short] = Score(suite, short, row, changes.get(task))
    return found


def _changes(first: Found, second: Found, reading: _Reading) -> dict[str, comparison.QualityRow]:
    """Each task's paired change, second minus first."""
    sides = [_by_task(reading.items(one)) for one in (first, second)]
    rows = {}
    for task, row in first.record["tasks"].items():
        mine, theirs = (side.get(task, []) for side in sides)
        if not mine or not theirs:
            continue  # the reading has noted why
        if [item["item"] for item in mine] != [item["item"] for item in theirs]:
            reading.problems[second.place] = (
                f"{task}: other items than {first.place} has, so no paired change"
            )
            continue
        value = second.record["tasks"][task]["value"]
        try:
            rows[task] = comparison.compare_items(task, row, value, mine, theirs)
        except SlimqwenError as error:
            reading.problems[second.place] = f"{task}: {error}"
    return rows


def _by_task(items: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    tasks: dict[str, list[Mapping[str, Any]]] = {}
    for item in items:
        tasks.setdefault(item["task"], []).append(item)
    return tasks


def _timed(
    collection: Collection, found: Found | None, baseline: str | None, reading: _Reading
) -> Timed | None:
    if found is None:
        return None
    items = reading.items(found)
    all_theirs = collection.of(baseline, "latency") if baseline else ()
    theirs = [one for one in all_theirs if one.record["workload"] == "classes"]
    # Made in turns with it, before any that is only newer.
    theirs.sort(key=lambda one: one.record["run"] != found.record["run"])
    paired = pair([found], theirs, comparison.latency_basis)
    timed = Timed(found, paired[1] if paired else None)
    if timed.against is None or not timed.in_turns:
        return timed
    sides = (timed.against.record, reading.items(timed.against)), (found.record, items)
    try:
        return replace(timed, speed=comparison.all_classes(*sides))
    except (SlimqwenError, ValueError, TypeError, KeyError) as error:
        reading.problems[found.place] = f"its items give no speed-up: {error!r}"
        return timed


def _acceptance(found: Found | None) -> tuple[int, Mapping[str, Any]] | None:
    """The depth of the gate, else the deepest, and the acceptance length at it."""
    if found is None:
        return None
    lengths = {row["depth"]: row["length"] for row in found.record["depths"] if row["length"]}
    if not lengths:
        return None
    gate: int = found.record["gate_depth"]
    depth = gate if gate in lengths else max(lengths)
    return depth, lengths[depth]


def _start_up(found: Found | None) -> StartUp | None:
    if found is None:
        return None
    kind = next(kind for kind in (*_START_KINDS, "warm") if kind in found.record)
    seconds = [start["ready_seconds"] for start in found.record[kind]]
    return StartUp(kind, median(seconds), min(seconds), max(seconds))


def _witness(kind: str, records: Sequence[Found], digest: str | None, scores: Iterable[Score]) -> Witness:
    if not records:
        return Witness(kind, "missing")
    newest = records[0]
    stale = digest is not None and _digest(newest) != digest
    says = str(newest.record.get("verdict") or "measured")
    if kind == "quality":
        changes = [score.change.judgement.verdict for score in scores if score.change]
        says = str(verdict.overall(changes)) if changes else "measured"
    elif kind == "engine":
        served = [cell["state"] for cell in newest.record["cells"] if cell["served"]]
        says = {"fine": "pass", "unsafe": "fail"}.get(served[0] if served else "", "measured")
    return Witness(kind, says, stale)


def _speed(row: Row) -> float:
    return row.timed.speed.speedup or 0.0 if row.timed and row.timed.speed else 0.0


def _passed_quality(row: Row) -> bool:
    return any((one.kind, one.says, one.stale) == ("quality", "pass", False) for one in row.witnesses)


def _fronts(rows: Sequence[Row]) -> tuple[list[Row], list[Front]]:
    """Each row with the fronts that it is on, and the fronts of every group that has a variant beside its baseline."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    on: dict[tuple[str, str], list[str]] = {}
    fronts = []
    for (baseline, place), members in groups.items():
        costs: dict[tuple[str, str], list[Point]] = {}
        for row in members:
            for cost, axis, point in _points(row):
                costs.setdefault((cost, axis), []).append(point)
        for (cost, axis), points in costs.items():
            if len(points) < 2:
                continue  # nothing to weigh it against
            front = Front(baseline, place, members[0].on_cpu, cost, axis, tuple(pareto(points)))
            fronts.append(front)
            for point in front.points:
                if point.on_front:
                    on.setdefault((point.variant, place), []).append(cost)
    fronts.sort(key=lambda one: -len(one.points))
    return [replace(row, fronts=tuple(on.get((row.variant, row.hardware), ()))) for row in rows], fronts


def _points(row: Row) -> list[tuple[str, str, Point]]:
    """A row's place in each plane; a baseline stands at 0, it is what changes are counted from."""
    quality = row.worst
    if quality is None and row.baseline is None and row.scores:
        quality = Margins("", 0.0, 0.0, 0.0)
    if quality is None:
        return []
    found: list[tuple[str, str, tuple[float, float, float]]] = []
    for name, of_class in (row.timed.classes if row.timed else {}).items():
        middle = of_class["e2el_ms"]["median"]
        times = middle, *_class_interval(row, name, middle)
        found.append((f"{name} E2EL", f"median E2EL of {name} prompts, ms", times))
    if row.size_bytes:
        found.append(("size", "checkpoint, MB", (row.size_bytes / 1e6,) * 3))
    if row.start_up:
        starts = row.start_up.value, row.start_up.low, row.start_up.high
        found.append(("start-up", "start-up until ready, s", starts))
    return [(cost, axis, Point(row.variant, row.stands, *values, quality)) for cost, axis, values in found]


def _class_interval(row: Row, name: str, middle: float) -> tuple[float, float]:
    """Of the median; the median itself where the items cannot be read."""
    assert row.timed is not None
    try:
        return median_interval(row.timed.found, name, "e2el_ms")
    except (SlimqwenError, ValueError, TypeError, KeyError):
        return middle, middle


def _choices(rows: Sequence[Row]) -> list[Choice]:
    """For every baseline and hardware with a record of a variant beside it: what to serve."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.baseline and row.newest:
            groups.setdefault(row.group, []).append(row)
    choices = []
    for (baseline, place), members in sorted(groups.items(), key=lambda one: (-len(one[1]), one[0])):
        able = [row for row in members if row.stands in ("promoted", "pass")]
        faster = [
            row
            for row in able
            if row.timed and row.timed.is_faster and _passed_quality(row) and not row.doubts
        ]
        serve = min(faster, key=lambda row: (row.status != "promoted", -_speed(row)), default=None)
        others = [row for row in members if row is not serve and row.stands not in ("fail", "rejected")]
        choices.append(Choice(baseline, place, members[0].on_cpu, serve, tuple(others)))
    return choices
