"""Chart panels of a record: lines over one pair of axes, as plain data; `report.charts` draws them."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """A labelled series of points.

    Attributes:
        label: name in the legend; the same label has the same colour in every panel.
        errors: half the length of each error bar.
        joined: whether a line joins the points.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    errors: Sequence[float] | None = None
    joined: bool = True


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        x: label of the horizontal axis, with its unit.
        y: label of the vertical axis, with its unit.
        bars: names of bars, at positions from 0, in which the series are stacked; empty for lines.
        positions: names of the whole numbers of the horizontal axis, from 0; empty for numbers. The figures of such
            lines are not listed beside the chart.
    """

    x: str
    y: str
    lines: Sequence[Line]
    bars: Sequence[str] = ()
    positions: Sequence[str] = ()
