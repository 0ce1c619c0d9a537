"""Trends: how the figures of a variant changed from commit to commit and from one engine version to the next.

A record kind says by `Record.trends` which of its figures have one. A line joins records of one kind of hardware and
of the same data files only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slimqwen.records import registry
from slimqwen.records.collection import Collection, StoredRecord
from slimqwen.records.figures import Figure
from slimqwen.records.pairing import hardware_basis
from slimqwen.records.provenance import commit_name, hardware_name
from slimqwen.records.record import Record
from slimqwen.report.charts import AT_Y1, HEIGHT, LOOK, WIDTH, Chart, Values, axis, chart, series
from slimqwen.stats.intervals import Z

SIZE = "Checkpoint, MB"

_LEVEL_LABELS = 5
"""Most records with horizontal labels; those of more would overlap."""


@dataclass(frozen=True)
class Observation:
    """A figure of one record.

    Attributes:
        basis: what two observations must share for a line to join them.
    """

    entry: StoredRecord[Record]
    figure: Figure
    basis: str = ""

    @property
    def interval(self) -> tuple[float, float] | None:
        """Its 95 % interval; None where the record holds none."""
        figure = self.figure
        if figure.low is not None and figure.high is not None:
            return figure.low, figure.high
        if figure.standard_error is not None:
            return figure.value - Z * figure.standard_error, figure.value + Z * figure.standard_error
        return None


Trend = Mapping[str, Sequence[Observation]]
"""Observations by series, the oldest first."""


def trends(records: Collection, variant: str) -> dict[str, Trend]:
    """Figures of a variant that two or more records have, by the name of the figure.

    Args:
        records: all records; those of a busy host or of a split are left out.
    """
    entries = [entry for kind in registry.kinds().values() for entry in records.select(kind, variant)]
    by_figure: dict[str, dict[str, list[Observation]]] = {}
    for entry in sorted(entries, key=_age):
        for (name, label), figure in entry.record.trends().items():
            basis = f"{_machine(entry)} {entry.record.provenance.datasets}"
            by_figure.setdefault(name, {}).setdefault(label, []).append(Observation(entry, figure, basis))
        _add_size(by_figure.setdefault(SIZE, {}).setdefault("", []), entry)
    trends_by_figure: dict[str, Trend] = {}
    for name in sorted(by_figure, key=lambda name: (name == SIZE, name)):
        repeated = {label: rows for label, rows in by_figure[name].items() if len(rows) > 1}
        if repeated:
            trends_by_figure[name] = repeated
    return trends_by_figure


def trend_chart(name: str, trend: Trend) -> Chart:
    """One panel per series over the records in their order, one line per kind of hardware."""
    machines = _machines([row for rows in trend.values() for row in rows])
    entries = {row.entry.location: row.entry for rows in trend.values() for row in rows}
    ticks = _ticks(sorted(entries.values(), key=_age))
    panels = []
    rows = []
    for label, observations in trend.items():
        values: Values = []
        for observation in observations:
            entry = observation.entry
            low, high = observation.interval or (observation.figure.value,) * 2
            machine = machines[_machine(entry)]
            values.append(
                {
                    "x": ticks[entry.location],
                    "y": observation.figure.value,
                    "y1": low,
                    "y2": high,
                    "series": machine,
                    "basis": observation.basis,
                }
            )
            provenance = entry.record.provenance
            rows.append(
                (
                    label or name,
                    commit_name(provenance.git),
                    _engine(entry) or "-",
                    provenance.ended[:10],
                    machine,
                    f"{observation.figure.value:,.4g}",
                    f"{low:,.4g} to {high:,.4g}" if observation.interval else "-",
                )
            )
        # Panels share their labels: those of the last one are below all.
        is_last = label == list(trend)[-1]
        size = HEIGHT if len(trend) == 1 else HEIGHT / 2
        panels.append(
            _panel(label, values, list(ticks.values()), list(machines.values()), size, labels=is_last)
        )
    return chart(
        name,
        "From the oldest record to the newest; bars are 95 % intervals. A line joins records of one kind of "
        "hardware and the same data files.",
        {"vconcat": panels, "spacing": 12, "config": {**LOOK, "legend": {**LOOK["legend"], "columns": 1}}},
        ("series", "commit", "engine", "date", "hardware", "value", "95 % interval"),
        tuple(rows),
    )


def _add_size(sizes: list[Observation], entry: StoredRecord[Record]) -> None:
    """Add the size of a record's checkpoint, if it is another checkpoint than the last one."""
    checkpoint = entry.record.provenance.checkpoint
    if checkpoint is None or checkpoint.size_bytes is None:
        return
    if not sizes or sizes[-1].entry.record.provenance.checkpoint_digest != checkpoint.digest:
        sizes.append(Observation(entry, Figure(checkpoint.size_bytes / 1e6, "MB")))


def _age(entry: StoredRecord[Record]) -> tuple[str, str]:
    return entry.ended, entry.location


def _engine(entry: StoredRecord[Record]) -> str:
    """The version of vLLM; empty where none was installed."""
    version = entry.record.provenance.packages.get("vllm", "")
    return version and f"vLLM {version}"


def _machine(entry: StoredRecord[Record]) -> str:
    return repr(hardware_basis(entry.record))


def _machines(observations: Sequence[Observation]) -> dict[str, str]:
    """Names by kind of hardware; kinds of one name are numbered."""
    names: dict[str, str] = {}
    for observation in observations:
        key = _machine(observation.entry)
        if key not in names:
            name = hardware_name(observation.entry.record.provenance.hardware)
            count = sum(other.partition(" (")[0] == name for other in names.values())
            names[key] = f"{name} ({count + 1})" if count else name
    return names


def _ticks(entries: Sequence[StoredRecord[Record]]) -> dict[str, str]:
    """A label by record: its position, its commit, and its engine version where it changes."""
    ticks = {}
    previous = ""
    for position, entry in enumerate(entries):
        engine = _engine(entry)
        commit = (entry.record.provenance.git.commit or "none")[:7]
        ticks[entry.location] = f"{position}|{commit}|{engine if engine != previous else ''}"
        previous = engine
    return ticks


def _panel(
    title: str, values: Values, ticks: Sequence[str], machines: Sequence[str], height: float, *, labels: bool
) -> dict[str, Any]:
    """One pair of axes; `labels`: whether commits and engines are written below it."""
    is_level = len(ticks) <= _LEVEL_LABELS
    x = {
        "field": "x",
        "type": "nominal",
        "title": None,
        "scale": {"domain": ticks, "padding": 0.5},
        "axis": {
            "labels": labels,
            # A slanted label is on one line.
            "labelExpr": "slice(split(datum.label, '|'), 1)"
            if is_level
            else "trim(join(slice(split(datum.label, '|'), 1), ' '))",
            "labelAngle": 0 if is_level else -60,
            "grid": False,
        },
    }
    y = {**axis("y", ""), "title": None}
    colour = series(machines)["color"]
    line = {"x": x, "y": y, "color": colour, "detail": {"field": "basis"}}
    interval = {"x": x, "y": AT_Y1, "y2": {"field": "y2"}, "color": colour}
    layers = [
        {"mark": {"type": "line", "strokeWidth": 1.5}, "encoding": line},
        {"mark": {"type": "rule", "strokeWidth": 1.2}, "encoding": interval},
        {
            "mark": {"type": "point", "filled": True, "size": 44, "opacity": 1},
            "encoding": {"x": x, "y": y, "color": colour},
        },
    ]
    panel = {"width": WIDTH, "height": height, "data": {"values": values}, "layer": layers}
    if title:
        look = {"anchor": "start", "fontSize": 11, "fontWeight": "normal", "color": "var(--muted)"}
        panel["title"] = {"text": title, **look}
    return panel
