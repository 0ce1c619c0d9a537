"""Pareto fronts of quality against cost, and which variant to serve."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from slimqwen.report.leaderboard import DAMAGED, Margins, Row, Timing, hardware, median_interval

_COST_UNITS = ("s", "ms")
"""Units of leaderboard figures that are costs: less is better."""

_ORDER = {"promoted": 0, "pass": 1, "inconclusive": 2, "measured": 3, "fail": 4, "rejected": 5}


@dataclass(frozen=True)
class Point:
    """A row in a plane of cost and quality, with the 95 % interval of the cost."""

    variant: str
    standing: str
    cost: float
    cost_low: float
    cost_high: float
    quality: Margins
    on_front: bool = False


@dataclass(frozen=True)
class Front:
    """Quality against one cost, among variants of one baseline on one hardware.

    Attributes:
        baseline: the variant at quality 0.
        cost: short name of the cost.
        axis: name of the cost with its unit.
        points: variants in the order of their cost, the baseline included.
    """

    baseline: str
    hardware: str
    on_cpu: bool
    cost: str
    axis: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Choice:
    """Which variant of a baseline to serve on one hardware.

    Attributes:
        serve: the row to serve; None if no variant passes, also in quality, and is faster by its whole interval.
        runners_up: other rows with records, the most promising first.
    """

    baseline: str
    hardware: str
    on_cpu: bool
    serve: Row | None
    runners_up: tuple[Row, ...]


@dataclass(frozen=True)
class Board:
    """All rows, the most promising first, with their fronts and choices."""

    rows: tuple[Row, ...]
    fronts: tuple[Front, ...]
    choices: tuple[Choice, ...]


def board(rows: Sequence[Row]) -> Board:
    """Order the rows; find the fronts and what to serve."""
    fronts = _fronts(rows)
    on_front: dict[tuple[str, str], list[str]] = {}
    for front in fronts:
        for point in front.points:
            if point.on_front:
                on_front.setdefault((point.variant, front.hardware), []).append(front.cost)
    marked = [replace(row, fronts=tuple(on_front.get((row.variant, row.hardware), ()))) for row in rows]
    ordered = sorted(
        marked, key=lambda row: (_ORDER.get(row.standing, 6), -_speed(row), row.variant, row.hardware)
    )
    return Board(tuple(ordered), tuple(fronts), tuple(_choices(ordered)))


def pareto(points: Sequence[Point]) -> list[Point]:
    """The points by cost, marked where no other point is as good in both and better in one."""
    ordered = sorted(points, key=lambda point: (point.cost, -point.quality.value, point.variant))
    marked = []
    best_quality, best_cost = -math.inf, math.nan
    for point in ordered:
        is_equal = point.quality.value == best_quality and point.cost == best_cost
        on_front = point.quality.value > best_quality or is_equal
        marked.append(replace(point, on_front=on_front))
        if on_front:
            best_quality, best_cost = point.quality.value, point.cost
    return marked


def _fronts(rows: Sequence[Row]) -> list[Front]:
    """Fronts of every group that has a variant beside its baseline, those of most points first."""
    fronts = []
    for (baseline, machine), members in _groups(rows).items():
        planes: dict[tuple[str, str], list[Point]] = {}
        for row in members:
            quality = row.worst
            if quality is None and row.baseline is None and row.scores:
                quality = Margins("", 0.0, 0.0, 0.0)
            if quality is None:
                continue
            for cost, axis, values in _costs(row):
                point = Point(row.variant, row.standing, *values, quality)
                planes.setdefault((cost, axis), []).append(point)
        fronts += [
            Front(baseline, machine, members[0].on_cpu, cost, axis, tuple(pareto(points)))
            for (cost, axis), points in planes.items()
            if len(points) > 1
        ]
    return sorted(fronts, key=lambda front: -len(front.points))


def _groups(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    return groups


def _costs(row: Row) -> Iterator[tuple[str, str, tuple[float, float, float]]]:
    """Short name, name with unit, and value with its interval of each cost of a row."""
    if row.timed:
        for name in row.timed.classes:
            yield f"{name} E2EL", f"median E2EL of {name} prompts, ms", _median(row.timed, name)
    if row.size_bytes:
        yield "size", "checkpoint, MB", (row.size_bytes / 1e6,) * 3
    for heading, (figure, entry) in row.figures.items():
        if figure.unit in _COST_UNITS and hardware(entry) == row.hardware:
            low = figure.value if figure.low is None else figure.low
            high = figure.value if figure.high is None else figure.high
            yield heading.partition(",")[0], heading, (figure.value, low, high)


def _median(timed: Timing, prompt_class: str) -> tuple[float, float, float]:
    """Median E2EL with its interval, ms; an interval of width 0 where the items cannot be read."""
    median = timed.classes[prompt_class].e2el_ms.median
    try:
        return median, *median_interval(timed.latency, prompt_class, "e2el_ms")
    except DAMAGED:
        return median, median, median


def _speed(row: Row) -> float:
    return row.timed.speed.speedup or 0.0 if row.timed and row.timed.speed else 0.0


def _choices(rows: Sequence[Row]) -> list[Choice]:
    """What to serve, for every baseline and hardware with a measured variant."""
    measured = _groups([row for row in rows if row.baseline and row.is_measured])
    choices = []
    for (baseline, machine), members in sorted(
        measured.items(), key=lambda group: (-len(group[1]), group[0])
    ):
        faster = [
            row
            for row in members
            if row.standing in ("promoted", "pass")
            and row.passed_quality
            and row.timed
            and row.timed.is_faster
            and not row.doubts
        ]
        serve = min(faster, key=lambda row: (row.status != "promoted", -_speed(row)), default=None)
        others = [row for row in members if row is not serve and row.standing not in ("fail", "rejected")]
        choices.append(Choice(baseline, machine, members[0].on_cpu, serve, tuple(others)))
    return choices
