"""Charts of records: each a Vega-Lite figure as SVG, with the same figures as a table for whom a picture is no help.

Colours are names of CSS variables: a page sets them for light and dark, `standalone` writes both into the SVG.
"""

import contextlib
import html
import multiprocessing
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any

import vl_convert

from slimqwen.progress import Progress, silent
from slimqwen.records.collection import Found
from slimqwen.report.leaderboard import (
    CPU_NOTE,
    Front,
    Point,
    Score,
    in_margins,
    items_of_class,
    median_interval,
)
from slimqwen.report.lineage import StageSize

Values = list[dict[str, Any]]

_WIDTH, _HEIGHT = 300, 190
_MOST_POINTS = 60
"""Of a line: more cannot be seen on a chart of this width."""

_MANY = 100
"""Charts: starting further processes costs as much as drawing so many."""

_MOST_NAMES = 8
"""Written beside points: more would lie upon each other."""

_SAME_PLACE = 0.05
"""Of width and height: names of points that are nearer than that would lie upon each other."""

_SERIES = [f"var(--c{number})" for number in range(1, 9)]
_DASHES = [[1, 0], [6, 3], [2, 2]]
_VERDICTS = {
    "pass": ("var(--pass)", "circle"),
    "promoted": ("var(--pass)", "circle"),
    "inconclusive": ("var(--unsure)", "triangle-up"),
    "fail": ("var(--fail)", "cross"),
    "rejected": ("var(--fail)", "cross"),
}
_NO_VERDICT = ("var(--plain)", "square")
_BASELINE = ("var(--ink)", "diamond")

_COLOUR = {"field": "colour", "type": "nominal", "scale": None}
_SHAPE = {"field": "shape", "type": "nominal", "scale": None}
_AT_X1 = {"field": "x1", "type": "quantitative"}
_AT_Y1 = {"field": "y1", "type": "quantitative"}

_LOOK = {
    "background": "transparent",
    "aria": False,  # the whole is one image with a label; its parts would only be read out as noise
    "font": "sans-serif",
    "view": {"stroke": None},
    "axis": {
        "labelColor": "var(--muted)",
        "titleColor": "var(--muted)",
        "titleFontWeight": "normal",
        "titleFontSize": 11,
        "labelFontSize": 11,
        "gridColor": "var(--grid)",
        "domainColor": "var(--line)",
        "tickColor": "var(--line)",
        "tickCount": 5,
        "labelLimit": 140,
        "titlePadding": 10,
    },
    "legend": {
        "orient": "bottom",
        "title": None,
        "labelColor": "var(--ink)",
        "labelFontSize": 11,
        "labelLimit": 220,
        "columns": 2,
        "columnPadding": 28,
        "symbolStrokeWidth": 2,
        "symbolSize": 60,
    },
    "header": {"labelColor": "var(--muted)", "titleColor": "var(--muted)"},
    "text": {"color": "var(--ink)", "fontSize": 11},
}

_STANDALONE = """<style>
:root{--ink:#1d2329;--muted:#5a6570;--line:#b9c2cb;--grid:#e8ecef;--plain:#5a6570;--pass:#15693d;--fail:#b3302f;
--unsure:#855a00;--c1:#2f6fb3;--c2:#c2601f;--c3:#2a8a72;--c4:#8657b5;--c5:#b0457d;--c6:#6d7a1f;--c7:#3f8fa8;--c8:#8a6a4f}
@media (prefers-color-scheme:dark){:root{--ink:#e6eaee;--muted:#a3aeb9;--line:#4a545e;--grid:#2a3138;--plain:#a3aeb9;
--pass:#56c98a;--fail:#f08080;--unsure:#e3b341;--c1:#79b0ea;--c2:#f0a066;--c3:#66cbb0;--c4:#c19cec;--c5:#ee8fbd;
--c6:#c3cf62;--c7:#7fcbe2;--c8:#cfae90}}
</style>"""


@dataclass
class Chart:
    """A picture, its words, and its figures.

    Attributes:
        title: what it shows.
        note: how to read it.
        columns: of its table; the first is text.
        rows: of its table.
        spec: the picture in Vega-Lite.
        svg: the picture to stand within a page; `draw` makes it.
    """

    title: str
    note: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    spec: Mapping[str, Any]
    svg: str = ""

    @property
    def standalone(self) -> str:
        """The picture as a file of its own, for a README: its colours follow the reader's."""
        opening, rest = self.svg.split(">", 1)
        return f"{opening}>{_STANDALONE}{rest}\n"


def draw(charts: Sequence[Chart], progress: Progress = silent) -> None:
    """Make the pictures of charts, in as many processes as there are processors where there are many of them.

    Args:
        charts: each receives its `svg`.
        progress: hears the pictures made.
    """
    specs = [chart.spec for chart in charts]
    with contextlib.ExitStack() as stack:
        pictures: Iterable[str] = map(_picture, specs)
        if len(specs) > _MANY:
            # Forked, a process would inherit a JavaScript engine without its threads.
            context = multiprocessing.get_context("spawn")
            pool = stack.enter_context(ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=context))
            pictures = pool.map(_picture, specs, chunksize=16)
        for done, (chart, picture) in enumerate(zip(charts, pictures, strict=True)):
            progress("draw the charts", done, len(charts))
            label = html.escape(
                f"{chart.title}. {chart.note} The figures stand in the table below.", quote=True
            )
            chart.svg = picture.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
    progress("draw the charts", len(charts), len(charts))


def _picture(spec: Mapping[str, Any]) -> str:
    return str(vl_convert.vegalite_to_svg(dict(spec), vl_version="5.21"))


def pareto(front: Front) -> Chart:
    """Quality against one cost; a line joins what no other variant beats in both."""
    by_interest = sorted(front.points, key=lambda one: (one.variant != front.baseline, not one.on_front))
    names = _names(by_interest[:_MOST_NAMES])
    values: Values = []
    for point in front.points:
        colour, shape = _BASELINE if point.variant == front.baseline else _verdict(point.stands)
        values.append(
            {
                "name": names.get(point.variant, ""),
                "colour": colour,
                "shape": shape,
                "x": point.cost,
                "x1": point.cost_low,
                "x2": point.cost_high,
                "y": point.quality.value,
                "y1": point.quality.low,
                "y2": point.quality.high,
                "front": point.on_front,
            }
        )
    low, high = min(one.cost_low for one in front.points), max(one.cost_high for one in front.points)
    edge = low + 0.9 * (high - low)
    x = _axis("x", front.axis, padding=14)
    y = _axis("y", "worst task, change in margins", padding=10)
    interval = {"type": "rule", "strokeWidth": 1.2, "opacity": 0.55}
    layers = [
        _rule("y", -1, "var(--fail)", dashed=True),
        _rule("y", 0, "var(--line)"),
        {
            "transform": [{"filter": "datum.front"}],
            "mark": {"type": "line", "interpolate": "step-after", "strokeWidth": 1.5},
            "encoding": {"x": x, "y": y, "color": {"value": "var(--c1)"}},
        },
        {"mark": interval, "encoding": {"x": x, "y": _AT_Y1, "y2": {"field": "y2"}, "color": _COLOUR}},
        {"mark": interval, "encoding": {"x": _AT_X1, "x2": {"field": "x2"}, "y": y, "color": _COLOUR}},
        {
            "mark": {"type": "point", "filled": True, "size": 70, "opacity": 1},
            "encoding": {"x": x, "y": y, "color": _COLOUR, "shape": _SHAPE},
        },
        # At the right edge to the left of the point: beyond the edge a name would be cut.
        *(
            {
                "transform": [{"filter": f"datum.x {side} {edge}"}],
                "mark": {"type": "text", "align": align, "dx": dx, "dy": -7},
                "encoding": {"x": x, "y": y, "text": {"field": "name"}},
            }
            for align, dx, side in (("left", 7, "<="), ("right", -7, ">"))
        ),
    ]
    rows = tuple(
        (
            point.variant,
            "baseline" if point.variant == front.baseline else point.stands,
            f"{point.cost:,.2f}"
            if point.cost_low == point.cost_high
            else f"{point.cost:,.1f} [{point.cost_low:,.1f}, {point.cost_high:,.1f}]",
            f"{point.quality.value:+.2f} [{point.quality.low:+.2f}, {point.quality.high:+.2f}]",
            point.quality.task or "-",
            "yes" if point.on_front else "no",
        )
        for point in front.points
    )
    note = (
        f"Against {front.baseline} at 0, on {front.hardware}. Up and left is better; the line joins the front, the "
        "dashed rule is the margin. Circle: pass, triangle: inconclusive, cross: fail, square: no verdict, diamond: "
        f"the baseline.{f' {CPU_NOTE}' if front.on_cpu else ''}"
    )
    return _chart(
        f"Quality against {front.cost}",
        note,
        {"layer": layers, "data": {"values": values}},
        ("variant", "stands", front.axis, "worst task, in margins", "which", "on the front"),
        rows,
    )


def _names(points: Sequence[Point]) -> dict[str, str]:
    """Variant -> what is written beside its point; points that lie on each other have one text for all."""
    costs = [point.cost for point in points]
    qualities = [end for point in points for end in (point.quality.low, point.quality.high, -1.0)]
    width, height = max(costs) - min(costs), max(qualities) - min(qualities)
    found: dict[str, str] = {}
    written: list[Point] = []
    for point in points:
        for other in written:
            beside = abs(point.cost - other.cost) <= _SAME_PLACE * width
            if beside and abs(point.quality.value - other.quality.value) <= _SAME_PLACE * height:
                found[other.variant] += f", {point.variant}"
                break
        else:
            written.append(point)
            found[point.variant] = point.variant
    return found


def changes(scores: Iterable[Score]) -> Chart | None:
    """Each task's paired change in margins with its interval; None where nothing was paired."""
    paired = [(score, in_margins(score.change), score.change) for score in scores if score.change]
    if not paired:
        return None
    values: Values = [
        {
            "task": score.task,
            "x": found.value,
            "x1": found.low,
            "x2": found.high,
            "colour": _verdict(str(change.judgement.verdict))[0],
            "shape": _verdict(str(change.judgement.verdict))[1],
        }
        for score, found, change in paired
    ]
    y = {**_bars("task"), "axis": {"grid": True, "ticks": False}}
    x = _axis("x", "gain in margins (-1: the margin)")
    layers = [
        _rule("x", -1, "var(--fail)", dashed=True),
        _rule("x", 0, "var(--line)"),
        {
            "mark": {"type": "rule", "strokeWidth": 2},
            "encoding": {"y": y, "x": _AT_X1, "x2": {"field": "x2"}, "color": _COLOUR},
        },
        {
            "mark": {"type": "point", "filled": True, "size": 80, "opacity": 1},
            "encoding": {"y": y, "x": x, "color": _COLOUR, "shape": _SHAPE},
        },
    ]
    rows = tuple(
        (
            score.task,
            f"{found.value:+.2f}",
            f"{found.low:+.2f} to {found.high:+.2f}",
            str(change.judgement.verdict),
        )
        for score, found, change in paired
    )
    return _chart(
        "Quality by task, paired with the baseline",
        "95 % intervals. A task passes where its whole interval lies right of the dashed margin.",
        {"layer": layers, "data": {"values": values}, "height": {"step": 26}},
        ("task", "gain in margins", "95 % interval", "verdict"),
        rows,
    )


def latency_distributions(sides: Sequence[Found]) -> Chart:
    """The share of the requests of each class that were done by a time, a line a record, one class below the other.

    Args:
        sides: latency records of the same requests, the variant's first.

    Raises:
        RecordError: items are damaged.
    """
    panels = []
    rows = []
    for name, of_class in sides[0].record["classes"].items():
        shape = f"{name} {of_class['prompt_tokens']} -> {of_class['output_tokens']}"
        values: Values = []
        for found in sides:
            times = sorted(float(item["e2el_ms"]) for item in items_of_class(found, name))
            if not times:
                continue
            steps = min(len(times), _MOST_POINTS)
            for step in range(1, steps + 1):
                place = -(-step * len(times) // steps) - 1
                values.append({"x": times[place], "y": (place + 1) / len(times), "series": found.variant})
            low, high = median_interval(found, name, "e2el_ms")
            interval = f"{low:,.1f} to {high:,.1f}"
            rows.append(
                (
                    shape,
                    found.variant,
                    str(len(times)),
                    f"{median(times):,.1f}",
                    interval,
                    f"{times[-1]:,.1f}",
                )
            )
        share = {
            **_axis("y", "share done"),
            "scale": {"domain": [0, 1]},
            "axis": {"format": "%", "tickCount": 3},
        }
        panels.append(
            {
                "width": _WIDTH,
                "height": _HEIGHT / 2,
                "data": {"values": values},
                "mark": {"type": "line", "interpolate": "step-after", "strokeWidth": 1.8},
                "encoding": {
                    "x": _axis("x", f"E2EL of {shape} tokens, ms"),
                    "y": share,
                    **_series([found.variant for found in sides]),
                },
            }
        )
    return _chart(
        "Latency distributions",
        "The share of each class's requests that were done by then. Left is better.",
        {"vconcat": panels},
        ("class, tokens", "variant", "requests", "median, ms", "95 % interval", "slowest, ms"),
        tuple(rows),
    )


def time_per_token(sides: Sequence[Found]) -> Chart:
    """TPOT against the length of the context, a line a record of the workload context."""
    values: Values = []
    for found in sides:
        for of_class in found.record["classes"].values():
            of = of_class["tpot_ms"]
            values.append(
                {
                    "series": found.variant,
                    "x": of_class["prompt_tokens"],
                    "y": of["mean"],
                    "y1": of["mean"] - of["standard_error"],
                    "y2": of["mean"] + of["standard_error"],
                    "median": of["median"],
                }
            )
    return _lines(
        "Time per output token against context",
        "Means of TPOT, bars of one standard error. What grows with the context is attention.",
        values,
        ("context, tokens", "TPOT, ms"),
        tuple(
            (one["series"], f"{one['x']:,}", f"{one['y']:.2f} ± {one['y2'] - one['y']:.2f}") for one in values
        ),
        ("variant", "context, tokens", "TPOT, ms"),
    )


def _length_rows(values: Values) -> tuple[tuple[str, str, str], ...]:
    return tuple(
        (one["series"], str(one["x"]), f"{one['y']:.3f} ± {one['y2'] - one['y']:.3f}") for one in values
    )


def acceptance(sides: Sequence[Found]) -> Chart:
    """Acceptance length against K over all greedy continuations, a line a record."""
    values: Values = []
    for found in sides:
        for row in found.record["depths"]:
            if row["length"]:
                values.append(_estimate(found.variant, row["depth"], row["length"]))
    return _lines(
        "Acceptance length against draft depth",
        "Greedy continuations of all classes, bars of one standard error. A depth pays while its line still climbs.",
        values,
        ("tokens drafted (K)", "acceptance length, tokens"),
        _length_rows(values),
        ("variant", "K", "acceptance length"),
        whole=True,
    )


def acceptance_by_class(found: Found) -> Chart:
    """One record's acceptance length against K, a line a class and temperature."""
    values: Values = [
        _estimate(f"{one['class']}, temperature {one['temperature']:g}", row["depth"], one["length"])
        for row in found.record["depths"]
        for one in row["settings"]
    ]
    return _lines(
        "Acceptance length by class and temperature",
        "Bars of one standard error.",
        values,
        ("tokens drafted (K)", "acceptance length, tokens"),
        _length_rows(values),
        ("class", "K", "acceptance length"),
        whole=True,
    )


def start_up(sides: Sequence[Found]) -> Chart | None:
    """Seconds of each phase of a start, a bar a variant and kind of start; None of records without phases."""
    values: Values = []
    for found in sides:
        for kind in ("cold", "warm", "baked", "eager"):
            starts = [start["phases"] for start in found.record.get(kind, ()) if "phases" in start]
            for order, phase in enumerate(starts[0] if starts else ()):
                values.append(
                    {
                        "bar": f"{found.variant}, {kind}" if len(sides) > 1 else kind,
                        "phase": phase.replace("_", " "),
                        "seconds": median(start[phase] for start in starts),
                        "order": order,
                    }
                )
    if not values:
        return None
    phases = list(dict.fromkeys(one["phase"] for one in values))
    spec = {
        "data": {"values": values},
        "mark": {"type": "bar"},
        "height": {"step": 26},
        "encoding": {
            "y": _bars("bar"),
            "x": {"field": "seconds", "type": "quantitative", "title": "seconds, medians added up"},
            "color": {"field": "phase", "type": "nominal", "scale": {"domain": phases, "range": _SERIES}},
            "order": {"field": "order"},
        },
    }
    return _chart(
        "Start-up, phase by phase",
        f"Of {', '.join(one.variant for one in sides)}, from the start of the first process to the first token. "
        "Left is better.",
        spec,
        ("start", "phase", "median, s"),
        tuple((one["bar"], one["phase"], f"{one['seconds']:.1f}") for one in values),
    )


def coverage(found: Found) -> Chart:
    """The share of old tokens that smaller vocabularies keep, a line a source of text."""
    values: Values = [
        {"series": source, "x": row["size"], "y": of["coverage"]}
        for row in sorted(found.record["sizes"], key=lambda row: float(row["size"]))
        for source, of in row["sources"].items()
    ]
    return _lines(
        "Coverage against vocabulary size",
        f"Share of each source's tokens that a smaller vocabulary of {found.variant} keeps whole.",
        values,
        ("tokens kept", "share of tokens kept"),
        tuple((one["series"], f"{one['x']:,}", f"{one['y']:.4f}") for one in values),
        ("source", "tokens kept", "coverage"),
    )


def stage_sizes(variant: str, sizes: Sequence[StageSize]) -> Chart:
    """A waterfall of bytes: the checkpoint that the recipe started from, what each stage took or gave, the result."""
    megabytes = [one.size_bytes / 1e6 for one in sizes]
    whole = {"x1": 0.0, "colour": "var(--line)", "label": ""}
    bars: Values = [{"bar": sizes[0].stage, "x2": megabytes[0], **whole}]
    rows = [(sizes[0].stage, f"{megabytes[0]:,.2f}", "-")]
    steps = zip(sizes[1:], megabytes, megabytes[1:], strict=False)
    for number, (one, before, after) in enumerate(steps, 1):
        colour = "var(--pass)" if after <= before else "var(--fail)"
        name, change = f"{number}. {one.stage}", f"{after - before:+,.2f}"
        bars.append({"bar": name, "x1": before, "x2": after, "colour": colour, "label": change})
        rows.append((name, f"{after:,.2f}", change))
    bars.append({"bar": "result", "x2": megabytes[-1], **whole})
    y, title = _bars("bar"), "MB on disk"
    layers = [
        {
            "mark": {"type": "bar"},
            "encoding": {"y": y, "x": {**_AT_X1, "title": title}, "x2": {"field": "x2"}, "color": _COLOUR},
        },
        {
            "transform": [{"calculate": "max(datum.x1, datum.x2)", "as": "end"}],
            "mark": {"type": "text", "align": "left", "dx": 4},
            "encoding": {"y": y, "x": _axis("end", title), "text": {"field": "label"}},
        },
    ]
    return _chart(
        "Size, stage by stage",
        f"What each stage of {variant}'s recipe took from the checkpoint, or gave to it.",
        {"layer": layers, "data": {"values": bars}, "height": {"step": 26}},
        ("after", "MB", "change"),
        tuple(rows),
    )


def stage_fidelity(found: Found) -> Chart | None:
    """A waterfall of KL: what each stage added to the distance from the baseline; None of a record without stages."""
    stages = [(f"{number}. {row['stage']}", row) for number, row in enumerate(found.record["stages"], 1)]
    stages = [(name, row) for name, row in stages if row["kl_nats"]]
    if not stages:
        return None
    ends = [row["kl_nats"]["value"] for _, row in stages]
    values: Values = [
        {
            "bar": name,
            "x1": before,
            "x2": after,
            "colour": "var(--fail)" if after > before else "var(--pass)",
            "low": after - row["kl_nats"]["standard_error"],
            "high": after + row["kl_nats"]["standard_error"],
        }
        for (name, row), before, after in zip(stages, [0.0, *ends], ends, strict=False)
    ]
    y, title = _bars("bar"), "KL from the baseline, nats a token"
    layers = [
        {
            "mark": {"type": "bar"},
            "encoding": {"y": y, "x": {**_AT_X1, "title": title}, "x2": {"field": "x2"}, "color": _COLOUR},
        },
        {
            "mark": {"type": "rule", "strokeWidth": 1.5},
            "encoding": {
                "y": y,
                "x": _axis("low", title),
                "x2": {"field": "high"},
                "color": {"value": "var(--ink)"},
            },
        },
    ]
    return _chart(
        "Fidelity, stage by stage",
        f"What each stage of {found.variant} added to the distance of its next-token distributions; bars of one "
        "standard error.",
        {"layer": layers, "data": {"values": values}, "height": {"step": 26}},
        ("after", "KL, nats a token", "growth of bits per byte"),
        tuple((name, _plus_minus(row["kl_nats"]), _plus_minus(row["bits_per_byte"])) for name, row in stages),
    )


def _estimate(series: str, x: float, of: Mapping[str, float]) -> dict[str, Any]:
    value, error = of["value"], of["standard_error"]
    return {"series": series, "x": x, "y": value, "y1": value - error, "y2": value + error}


def _plus_minus(of: Mapping[str, float] | None) -> str:
    return f"{of['value']:.5f} ± {of['standard_error']:.5f}" if of else "-"


def _verdict(stands: str) -> tuple[str, str]:
    return _VERDICTS.get(stands, _NO_VERDICT)


def _axis(field: str, title: str, padding: int = 0) -> dict[str, Any]:
    scale = {"zero": False, "padding": padding}
    return {"field": field, "type": "quantitative", "title": title, "scale": scale}


def _bars(field: str) -> dict[str, Any]:
    return {"field": field, "type": "nominal", "sort": None, "title": None}


def _series(names: Sequence[str]) -> dict[str, Any]:
    """Colour and dash by series: beyond eight of them colours come again with another dash."""
    domain = list(dict.fromkeys(names))
    places = range(len(domain))
    colours = [_SERIES[place % len(_SERIES)] for place in places]
    dashes = [_DASHES[place // len(_SERIES) % len(_DASHES)] for place in places]
    return {
        channel: {"field": "series", "type": "nominal", "scale": {"domain": domain, "range": looks}}
        for channel, looks in (("color", colours), ("strokeDash", dashes))
    }


def _rule(axis: str, at: float, colour: str, *, dashed: bool = False) -> dict[str, Any]:
    return {
        "data": {"values": [{axis: at}]},
        "mark": {"type": "rule", **({"strokeDash": [4, 3]} if dashed else {})},
        "encoding": {axis: {"field": axis, "type": "quantitative"}, "color": {"value": colour}},
    }


def _lines(
    title: str,
    note: str,
    values: Values,
    axes: tuple[str, str],
    rows: tuple[tuple[str, ...], ...],
    columns: tuple[str, ...],
    *,
    whole: bool = False,
) -> Chart:
    """Lines with points, and error bars where the values have them."""
    series = _series([one["series"] for one in values])
    x, y = _axis("x", axes[0], padding=8), _axis("y", axes[1])
    if whole:
        x["axis"] = {"values": sorted({one["x"] for one in values}), "format": "d"}
    layers: list[dict[str, Any]] = [
        {"mark": {"type": "line", "strokeWidth": 1.8}, "encoding": {"x": x, "y": y, **series}},
        {
            "mark": {"type": "point", "filled": True, "size": 34, "opacity": 1},
            "encoding": {"x": x, "y": y, "color": series["color"]},
        },
    ]
    if values and "y1" in values[0]:
        bars = {"x": x, "y": _AT_Y1, "y2": {"field": "y2"}, "color": series["color"]}
        layers.append({"mark": {"type": "rule", "strokeWidth": 1.2}, "encoding": bars})
    return _chart(title, note, {"data": {"values": values}, "layer": layers}, columns, rows)


def _chart(
    title: str,
    note: str,
    spec: Mapping[str, Any],
    columns: tuple[str, ...],
    rows: tuple[tuple[str, ...], ...],
) -> Chart:
    whole = {"config": _LOOK, **spec}
    if "vconcat" not in spec:
        whole = {"width": _WIDTH, "height": _HEIGHT, **whole}
    return Chart(title, note, columns, rows, whole)
