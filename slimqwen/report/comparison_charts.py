"""Charts that compare variants: Pareto fronts, paired changes by task, latency distributions."""

from collections.abc import Iterable, Sequence
from statistics import median

from slimqwen.bench.latency import Latency
from slimqwen.records.collection import StoredRecord
from slimqwen.records.provenance import CPU_NOTE
from slimqwen.report.charts import (
    AT_X1,
    AT_Y1,
    COLOUR,
    HEIGHT,
    SHAPE,
    WIDTH,
    Chart,
    Values,
    axis,
    chart,
    rule,
    series,
)
from slimqwen.report.fronts import Front, Point
from slimqwen.report.leaderboard import Score, median_interval, requests

_NAMED_POINTS = 8
"""Most points with a name beside them: more names would overlap."""

_OVERLAP = 0.05
"""Share of width and height: names of points nearer than this would overlap."""

_STEPS = 60
"""Most points of a line: more cannot be distinguished."""

_VERDICTS = {
    "pass": ("var(--pass)", "circle"),
    "promoted": ("var(--pass)", "circle"),
    "inconclusive": ("var(--unsure)", "triangle-up"),
    "fail": ("var(--fail)", "cross"),
    "rejected": ("var(--fail)", "cross"),
}
"""Colour and shape of a point by verdict."""

_NO_VERDICT = ("var(--plain)", "square")
_BASELINE = ("var(--ink)", "diamond")


def pareto(front: Front) -> Chart:
    """Quality against one cost; a line joins the variants that no other beats in both."""
    ranked = sorted(front.points, key=lambda point: (point.variant != front.baseline, not point.on_front))
    names = _names(ranked[:_NAMED_POINTS])
    values: Values = []
    rows = []
    for point in front.points:
        standing, (colour, shape) = point.standing, _VERDICTS.get(point.standing, _NO_VERDICT)
        if point.variant == front.baseline:
            standing, (colour, shape) = "baseline", _BASELINE
        quality = point.quality
        cost = f"{point.cost:,.1f} [{point.cost_low:,.1f}, {point.cost_high:,.1f}]"
        if point.cost_low == point.cost_high:
            cost = f"{point.cost:,.2f}"
        values.append(
            {
                "name": names.get(point.variant, ""),
                "colour": colour,
                "shape": shape,
                "x": point.cost,
                "x1": point.cost_low,
                "x2": point.cost_high,
                "y": quality.value,
                "y1": quality.low,
                "y2": quality.high,
                "front": point.on_front,
            }
        )
        rows.append(
            (
                point.variant,
                standing,
                cost,
                f"{quality.value:+.2f} [{quality.low:+.2f}, {quality.high:+.2f}]",
                quality.task or "-",
                "yes" if point.on_front else "no",
            )
        )
    low, high = min(point.cost_low for point in front.points), max(point.cost_high for point in front.points)
    edge = low + 0.9 * (high - low)
    x = axis("x", front.axis, padding=14)
    y = axis("y", "worst task, change in margins", padding=10)
    interval = {"type": "rule", "strokeWidth": 1.2, "opacity": 0.55}
    layers = [
        rule("y", -1, "var(--fail)", dashed=True),
        rule("y", 0, "var(--line)"),
        {
            "transform": [{"filter": "datum.front"}],
            "mark": {"type": "line", "interpolate": "step-after", "strokeWidth": 1.5},
            "encoding": {"x": x, "y": y, "color": {"value": "var(--c1)"}},
        },
        {"mark": interval, "encoding": {"x": x, "y": AT_Y1, "y2": {"field": "y2"}, "color": COLOUR}},
        {"mark": interval, "encoding": {"x": AT_X1, "x2": {"field": "x2"}, "y": y, "color": COLOUR}},
        {
            "mark": {"type": "point", "filled": True, "size": 70, "opacity": 1},
            "encoding": {"x": x, "y": y, "color": COLOUR, "shape": SHAPE},
        },
        # Near the right edge a name stands left of its point, so that it is not clipped.
        *(
            {
                "transform": [{"filter": f"datum.x {side} {edge}"}],
                "mark": {"type": "text", "align": align, "dx": dx, "dy": -7},
                "encoding": {"x": x, "y": y, "text": {"field": "name"}},
            }
            for align, dx, side in (("left", 7, "<="), ("right", -7, ">"))
        ),
    ]
    note = (
        f"Against {front.baseline} at 0, on {front.hardware}. Up and left is better; the line joins the front, the "
        "dashed rule is the margin. Circle: pass, triangle: inconclusive, cross: fail, square: no verdict, diamond: "
        f"baseline.{f' {CPU_NOTE}' if front.on_cpu else ''}"
    )
    return chart(
        f"Quality against {front.cost}",
        note,
        {"layer": layers, "data": {"values": values}},
        ("variant", "standing", front.axis, "worst task, in margins", "which", "on the front"),
        tuple(rows),
    )


def _names(points: Sequence[Point]) -> dict[str, str]:
    """Text beside the point of each variant; overlapping points share one text."""
    costs = [point.cost for point in points]
    qualities = [end for point in points for end in (point.quality.low, point.quality.high, -1.0)]
    width, height = max(costs) - min(costs), max(qualities) - min(qualities)
    names: dict[str, str] = {}
    named_points: list[Point] = []
    for point in points:
        for other in named_points:
            near_in_cost = abs(point.cost - other.cost) <= _OVERLAP * width
            if near_in_cost and abs(point.quality.value - other.quality.value) <= _OVERLAP * height:
                names[other.variant] += f", {point.variant}"
                break
        else:
            named_points.append(point)
            names[point.variant] = point.variant
    return names


def changes(scores: Iterable[Score]) -> Chart | None:
    """Paired change of each task in margins with its interval; None if nothing is paired."""
    values: Values = []
    rows = []
    for score in scores:
        if score.change and (gain := score.gain):
            verdict = str(score.change.judgement.verdict)
            colour, shape = _VERDICTS.get(verdict, _NO_VERDICT)
            values.append(
                {
                    "task": score.task,
                    "x": gain.value,
                    "x1": gain.low,
                    "x2": gain.high,
                    "colour": colour,
                    "shape": shape,
                }
            )
            rows.append((score.task, f"{gain.value:+.2f}", f"{gain.low:+.2f} to {gain.high:+.2f}", verdict))
    if not rows:
        return None
    y = {
        "field": "task",
        "type": "nominal",
        "sort": None,
        "title": None,
        "axis": {"grid": True, "ticks": False},
    }
    x = axis("x", "gain in margins (-1: the margin)")
    layers = [
        rule("x", -1, "var(--fail)", dashed=True),
        rule("x", 0, "var(--line)"),
        {
            "mark": {"type": "rule", "strokeWidth": 2},
            "encoding": {"y": y, "x": AT_X1, "x2": {"field": "x2"}, "color": COLOUR},
        },
        {
            "mark": {"type": "point", "filled": True, "size": 80, "opacity": 1},
            "encoding": {"y": y, "x": x, "color": COLOUR, "shape": SHAPE},
        },
    ]
    return chart(
        "Quality by task, paired with the baseline",
        "95 % intervals. A task passes where its whole interval lies right of the dashed margin.",
        {"layer": layers, "data": {"values": values}, "height": {"step": 26}},
        ("task", "gain in margins", "95 % interval", "verdict"),
        tuple(rows),
    )


def latency_distributions(sides: Sequence[StoredRecord[Latency]]) -> Chart:
    """Cumulative distribution of E2EL, one panel per class and one line per record.

    Args:
        sides: latency records of the same requests, the variant's first.

    Raises:
        RecordError: items are damaged.
    """
    panels = []
    rows = []
    for name, figures in sides[0].record.classes.items():
        shape = f"{name} {figures.prompt_tokens} -> {figures.output_tokens}"
        values: Values = []
        for entry in sides:
            times = sorted(float(item["e2el_ms"]) for item in requests(entry, name))
            if not times:
                continue
            steps = min(len(times), _STEPS)
            for step in range(1, steps + 1):
                index = -(-step * len(times) // steps) - 1
                values.append({"x": times[index], "y": (index + 1) / len(times), "series": entry.variant})
            low, high = median_interval(entry, name, "e2el_ms")
            interval = f"{low:,.1f} to {high:,.1f}"
            middle, slowest = f"{median(times):,.1f}", f"{times[-1]:,.1f}"
            rows.append((shape, entry.variant, str(len(times)), middle, interval, slowest))
        share = {
            **axis("y", "share finished"),
            "scale": {"domain": [0, 1]},
            "axis": {"format": "%", "tickCount": 3},
        }
        panels.append(
            {
                "width": WIDTH,
                "height": HEIGHT / 2,
                "data": {"values": values},
                "mark": {"type": "line", "interpolate": "step-after", "strokeWidth": 1.8},
                "encoding": {
                    "x": axis("x", f"E2EL of {shape} tokens, ms"),
                    "y": share,
                    **series([entry.variant for entry in sides]),
                },
            }
        )
    return chart(
        "Latency distributions",
        "Share of each class's requests that were finished by then. Left is better.",
        {"vconcat": panels},
        ("class, tokens", "variant", "requests", "median, ms", "95 % interval", "slowest, ms"),
        tuple(rows),
    )
