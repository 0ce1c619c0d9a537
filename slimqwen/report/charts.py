"""The chart engine: Vega-Lite specifications drawn as SVG, each with its figures as a table for screen readers.

Colours are CSS variables: a page defines them for light and dark mode, `Chart.standalone` writes both into the file.
"""

import contextlib
import hashlib
import html
import importlib.metadata
import json
import multiprocessing
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import vl_convert

from slimqwen.progress import Progress, silent
from slimqwen.records import store
from slimqwen.records.panel import Panel
from slimqwen.records.record import Record
from slimqwen.serving.platform import allowed_cpus

Values = list[dict[str, Any]]

WIDTH, HEIGHT = 300, 190
"""Size of one pair of axes, pixels."""

COLOUR = {"field": "colour", "type": "nominal", "scale": None}
SHAPE = {"field": "shape", "type": "nominal", "scale": None}
AT_X1 = {"field": "x1", "type": "quantitative"}
AT_Y1 = {"field": "y1", "type": "quantitative"}

_PARALLEL_FROM = 100
"""Number of charts from which worker processes start faster than one process draws."""

_MARKED_POINTS = 20
"""Longest line whose points are marked."""

_LISTED_POINTS = 60
"""Longest line whose points are listed in the chart's table."""

_LEVEL_BARS = 4
"""Most bars with horizontal names; those of more would overlap."""

_SERIES = [f"var(--c{number})" for number in range(1, 10)]
_DASHES = [[1, 0], [6, 3], [2, 2]]

LOOK: dict[str, Any] = {
    "background": "transparent",
    "aria": False,  # the whole chart is one labelled image; reading its parts aloud is noise
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
    "text": {"color": "var(--ink)", "fontSize": 11},
}
"""Configuration of every chart."""

_STANDALONE = """<style>
:root{--ink:#1d2329;--muted:#5a6570;--line:#b9c2cb;--grid:#e8ecef;--plain:#5a6570;--pass:#15693d;--fail:#b3302f;
--unsure:#855a00;--c1:#2f6fb3;--c2:#c2601f;--c3:#2a8a72;--c4:#8657b5;--c5:#b0457d;--c6:#6d7a1f;--c7:#3f8fa8;--c8:#8a6a4f;
--c9:#7d8791}
@media (prefers-color-scheme:dark){:root{--ink:#e6eaee;--muted:#a3aeb9;--line:#4a545e;--grid:#2a3138;--plain:#a3aeb9;
--pass:#56c98a;--fail:#f08080;--unsure:#e3b341;--c1:#79b0ea;--c2:#f0a066;--c3:#66cbb0;--c4:#c19cec;--c5:#ee8fbd;
--c6:#c3cf62;--c7:#7fcbe2;--c8:#cfae90;--c9:#9aa5b0}}
</style>"""


@dataclass
class Chart:
    """A chart with its caption and its figures.

    Attributes:
        note: how to read it.
        columns: headings of its table; the first column is text.
        spec: Vega-Lite specification.
        svg: the drawn chart, for use inside a page; empty until `draw`.
    """

    title: str
    note: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    spec: Mapping[str, Any]
    svg: str = ""

    @property
    def standalone(self) -> str:
        """The drawn chart as a file; its colours follow the reader's light or dark mode."""
        opening, rest = self.svg.split(">", 1)
        return f"{opening}>{_STANDALONE}{rest}\n"


def draw(charts: Sequence[Chart], progress: Progress = silent, cache: Path | None = None) -> None:
    """Set `svg` of each chart, with a process per CPU if there are many.

    Args:
        cache: folder of the SVG files of earlier calls; afterwards it has those of these charts alone. None: draw all.
    """
    if cache:
        _draw_missing(charts, progress, cache)
    else:
        _draw_all(charts, progress)
    for chart in charts:
        label = html.escape(f"{chart.title}. {chart.note} The figures are in the table below.", quote=True)
        chart.svg = chart.svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


def _draw_missing(charts: Sequence[Chart], progress: Progress, cache: Path) -> None:
    """Draw the charts whose SVG files are not in the cache, and delete the files of no chart."""
    cache.mkdir(parents=True, exist_ok=True)
    names = {_digest(chart.spec): chart for chart in charts}
    cached = {file.stem: file for file in cache.glob("*.svg")}
    for name, file in cached.items():
        with contextlib.suppress(FileNotFoundError):  # another build deleted it
            if name in names:
                names[name].svg = file.read_text(encoding="utf-8")
            else:
                file.unlink()
    missing = {name: chart for name, chart in names.items() if not chart.svg}
    _draw_all(list(missing.values()), progress)
    for name, chart in missing.items():
        unfinished = cache / f".{name}.{os.getpid()}"
        unfinished.write_text(chart.svg, encoding="utf-8")
        unfinished.rename(cache / f"{name}.svg")
    for chart in charts:  # equal charts share a file
        chart.svg = names[_digest(chart.spec)].svg


def _digest(spec: Mapping[str, Any]) -> str:
    text = json.dumps([spec, importlib.metadata.version("vl-convert-python")], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _draw_all(charts: Sequence[Chart], progress: Progress) -> None:
    specs = [chart.spec for chart in charts]
    with contextlib.ExitStack() as stack:
        svgs: Iterable[str] = map(_svg, specs)
        if len(specs) > _PARALLEL_FROM:
            # A forked process would inherit a JavaScript engine without its threads.
            context = multiprocessing.get_context("spawn")
            pool = stack.enter_context(ProcessPoolExecutor(allowed_cpus(), mp_context=context))
            svgs = pool.map(_svg, specs, chunksize=16)
        for done, (chart, svg) in enumerate(zip(charts, svgs, strict=True)):
            progress("draw the charts", done, len(charts))
            chart.svg = svg
    progress("draw the charts", len(charts), len(charts))


def draw_beside(path: Path) -> Path | None:
    """Draw the chart of a record beside it as SVG.

    Returns:
        The SVG file; None if the record has no chart.

    Raises:
        RecordError: the record is damaged.
    """
    chart = of_record(store.read(path), "hconcat")
    if chart is None:
        return None
    draw([chart])
    file = path.with_suffix(".svg")
    file.write_text(chart.standalone, encoding="utf-8")
    return file


def of_record(record: Record, arrangement: Literal["hconcat", "vconcat"] = "vconcat") -> Chart | None:
    """The chart of a record: its kind's panels; None if the kind has none.

    Args:
        arrangement: panels beside or below each other.
    """
    panels = record.panels()
    if not panels:
        return None
    labels = list(dict.fromkeys(line.label for panel in panels for line in panel.lines))
    rows = tuple(
        (
            line.label,
            panel.y,
            panel.bars[int(x)] if panel.bars else f"{x:,.6g}",
            f"{y:,.4g}" + (f" ± {line.errors[index]:.2g}" if line.errors else ""),
        )
        for panel in panels
        for line in panel.lines
        if len(line.x) <= _LISTED_POINTS and not panel.positions
        for index, (x, y) in enumerate(zip(line.x, line.y, strict=True))
    )
    spec = {
        arrangement: [_panel_spec(panel, labels) for panel in panels],
        "resolve": {"scale": {"color": "shared", "strokeDash": "shared"}},
    }
    title = f"{record.kind.replace('_', ' ').capitalize()} of {record.variant}"
    description = (type(record).__doc__ or "").partition("\n")[0]
    return chart(title, description, spec, ("series", "figure", "x", "y"), rows)


def _bars_spec(panel: Panel, labels: Sequence[str]) -> dict[str, Any]:
    values = [
        {"series": line.label, "order": labels.index(line.label), "x": panel.bars[int(x)], "y": y}
        for line in panel.lines
        for x, y in zip(line.x, line.y, strict=True)
    ]
    angle = 0 if len(panel.bars) <= _LEVEL_BARS else -40
    encoding = {
        "x": {"field": "x", "type": "nominal", "title": panel.x, "sort": None, "axis": {"labelAngle": angle}},
        "y": {"field": "y", "type": "quantitative", "title": panel.y},
        "color": series(labels)["color"],
        "order": {"field": "order"},
    }
    return {"width": WIDTH, "height": HEIGHT, "data": {"values": values}, "mark": "bar", "encoding": encoding}


def _panel_spec(panel: Panel, labels: Sequence[str]) -> dict[str, Any]:
    if panel.bars:
        return _bars_spec(panel, labels)
    values: Values = []
    for number, line in enumerate(panel.lines):
        for index, (x, y) in enumerate(zip(line.x, line.y, strict=True)):
            error = line.errors[index] if line.errors else 0.0
            is_marked = not line.joined or len(line.x) <= _MARKED_POINTS
            point = {"series": line.label, "line": number, "x": x, "y": y, "y1": y - error, "y2": y + error}
            values.append({**point, "joined": line.joined, "marked": is_marked})
    series_encoding = series(labels)
    x_axis, y_axis = axis("x", panel.x, padding=8), axis("y", panel.y)
    positions = [value["x"] for value in values]
    if positions and all(float(x).is_integer() for x in positions):
        # Vega-Lite 5.21 drops `tickMinStep`, so no more ticks than whole numbers keep the step at 1 or above.
        most_ticks = min(LOOK["axis"]["tickCount"], max(1, int(max(positions) - min(positions))))
        x_axis["axis"] = {"format": ",d", "tickCount": most_ticks}
    if panel.positions:
        x_axis["axis"] = {
            "values": list(range(len(panel.positions))),
            "labelExpr": f"{json.dumps(list(panel.positions))}[datum.value]",
            "labelAngle": -45,
        }
    axes = {"x": x_axis, "y": y_axis}
    layers: list[dict[str, Any]] = [
        {
            "transform": [{"filter": "datum.joined"}],
            "mark": {"type": "line", "strokeWidth": 1.8},
            "encoding": {**axes, **series_encoding, "detail": {"field": "line"}},
        },
        {
            "transform": [{"filter": "datum.marked"}],
            "mark": {"type": "point", "filled": True, "size": 34, "opacity": 1},
            "encoding": {**axes, "color": series_encoding["color"]},
        },
    ]
    if any(line.errors for line in panel.lines):
        bars = {"x": x_axis, "y": AT_Y1, "y2": {"field": "y2"}, "color": series_encoding["color"]}
        layers.append({"mark": {"type": "rule", "strokeWidth": 1.2}, "encoding": bars})
    return {"width": WIDTH, "height": HEIGHT, "data": {"values": values}, "layer": layers}


def axis(field: str, title: str, padding: int = 0) -> dict[str, Any]:
    """A quantitative axis that need not include zero."""
    scale = {"zero": False, "padding": padding}
    return {"field": field, "type": "quantitative", "title": title, "scale": scale}


def series(labels: Sequence[str]) -> dict[str, Any]:
    """Colour and dash encodings by series; after nine series colours repeat with another dash."""
    domain = list(dict.fromkeys(labels))
    indices = range(len(domain))
    colours = [_SERIES[index % len(_SERIES)] for index in indices]
    dashes = [_DASHES[index // len(_SERIES) % len(_DASHES)] for index in indices]
    return {
        channel: {"field": "series", "type": "nominal", "scale": {"domain": domain, "range": looks}}
        for channel, looks in (("color", colours), ("strokeDash", dashes))
    }


def rule(direction: str, position: float, colour: str, *, dashed: bool = False) -> dict[str, Any]:
    """A layer with one line across the chart."""
    return {
        "data": {"values": [{direction: position}]},
        "mark": {"type": "rule", **({"strokeDash": [4, 3]} if dashed else {})},
        "encoding": {direction: {"field": direction, "type": "quantitative"}, "color": {"value": colour}},
    }


def chart(
    title: str,
    note: str,
    spec: Mapping[str, Any],
    columns: tuple[str, ...],
    rows: tuple[tuple[str, ...], ...],
) -> Chart:
    """A chart with the common look; a specification of one pair of axes has the common size."""
    full_spec = {"config": LOOK, **spec}
    if not {"vconcat", "hconcat"} & spec.keys():
        full_spec = {"width": WIDTH, "height": HEIGHT, **full_spec}
    return Chart(title, note, columns, rows, full_spec)


def _svg(spec: Mapping[str, Any]) -> str:
    return str(vl_convert.vegalite_to_svg(dict(spec), vl_version="5.21"))
