"""Chart of the report's page: quality against checkpoint size, with intervals, drawn as SVG by Vega-Lite.

Colours are CSS variables that the page defines for light and dark mode.
"""

import html
from collections.abc import Sequence
from typing import Any

import vl_convert

from slimqwen.report.leaderboard import Margins, Row

_LOOK: dict[str, Any] = {
    "background": "transparent",
    "aria": False,  # for screen readers, the whole chart is one labelled image
    "font": "sans-serif",
    "view": {"stroke": None},
    "axis": {
        "labelColor": "var(--muted)", "titleColor": "var(--muted)", "titleFontWeight": "normal",
        "gridColor": "var(--grid)", "domainColor": "var(--line)", "tickColor": "var(--line)", "tickCount": 5,
    },
    "text": {"color": "var(--ink)", "fontSize": 11},
}  # fmt: skip
_COLOURS = {
    "pass": "--pass",
    "promoted": "--pass",
    "inconclusive": "--unsure",
    "fail": "--fail",
    "rejected": "--fail",
}


def draw_front(rows: Sequence[Row]) -> str | None:
    """Draw the change in the worst task over checkpoint size, for a baseline and its variants on one hardware.

    Args:
        rows: rows of one group; variants without a paired score are left out.

    Returns:
        An SVG element with a text description that states the figures; None for fewer than two points.
    """
    points: dict[str, tuple[float, Margins, str]] = {}
    for row in rows:
        gain = row.worst or (Margins("", 0.0, 0.0, 0.0) if row.baseline is None and row.scores else None)
        if gain and row.size_bytes:
            points[row.variant] = (row.size_bytes / 1e6, gain, _COLOURS.get(row.standing, "--plain"))
    if len(points) < 2:
        return None
    values = [
        {
            "name": name,
            "x": size,
            "y": gain.value,
            "low": gain.low,
            "high": gain.high,
            "colour": f"var({colour})",
        }
        for name, (size, gain, colour) in points.items()
    ]
    x = {
        "field": "x",
        "type": "quantitative",
        "title": "checkpoint, MB",
        "scale": {"zero": False, "padding": 40},
    }
    y = {
        "field": "y",
        "type": "quantitative",
        "title": "worst task, change in margins",
        "scale": {"padding": 10},
    }
    colour = {"field": "colour", "type": "nominal", "scale": None}
    margin = {
        "data": {"values": [{"y": -1}]},
        "mark": {"type": "rule", "strokeDash": [4, 3]},
        "encoding": {"y": {"field": "y", "type": "quantitative"}, "color": {"value": "var(--fail)"}},
    }
    interval = {
        "x": x,
        "y": {"field": "low", "type": "quantitative"},
        "y2": {"field": "high"},
        "color": colour,
    }
    layers = [
        margin,
        {"mark": {"type": "rule", "opacity": 0.6}, "encoding": interval},
        {
            "mark": {"type": "point", "filled": True, "size": 70},
            "encoding": {"x": x, "y": y, "color": colour},
        },
        {
            "mark": {"type": "text", "align": "left", "dx": 7, "dy": -7},
            "encoding": {"x": x, "y": y, "text": {"field": "name"}},
        },
    ]
    spec = {"config": _LOOK, "width": 460, "height": 240, "data": {"values": values}, "layer": layers}
    described = "; ".join(
        f"{name}: {size:,.2f} MB, {gain.value:+.2f} [{gain.low:+.2f}, {gain.high:+.2f}] margins"
        for name, (size, gain, _) in points.items()
    )
    svg = str(vl_convert.vegalite_to_svg(spec, vl_version="5.21"))
    label = html.escape(
        f"Change in the worst task, in margins, over checkpoint size; the dashed line is the margin. {described}",
        quote=True,
    )
    return svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
