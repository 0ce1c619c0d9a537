"""Plots of records as SVG: one look for all, the same bytes for the same record."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

from slimqwen.evaluation import first_request as first_requests
from slimqwen.records import migrations, store


@dataclass(frozen=True)
class Line:
    """Points under one label, in order.

    Attributes:
        label: names them in the legend; the same label has the same colour in every panel.
        x: where they stand.
        y: their values.
        errors: half the length of each one's error bar.
        joined: by a line from point to point.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    errors: Sequence[float] | None = None
    joined: bool = True


@dataclass(frozen=True)
class Panel:
    """One pair of axes, its labels with units."""

    x: str
    y: str
    lines: Sequence[Line]


def beside(record: Path) -> Path:
    """Draw the plot of a record beside it; it has the suffix .svg.

    Raises:
        RecordError: the record is damaged.
    """
    found = store.read(record)
    kind, _ = migrations.named(found["schema"])
    file = record.with_suffix(".svg")
    write(file, _PANELS[kind](found))
    return file


def write(file: Path, panels: Sequence[Panel]) -> None:
    """Draw panels side by side over one legend into an SVG file."""
    # Heavy: paid by whoever draws.
    import matplotlib
    from matplotlib.figure import Figure

    labels = list(dict.fromkeys(line.label for panel in panels for line in panel.lines))
    styles = {
        label: {"color": f"C{place % 10}", "linestyle": ("-", "--", ":")[place // 10 % 3]}
        for place, label in enumerate(labels)
    }
    # A fixed salt and no date: otherwise ids and bytes differ from run to run.
    with matplotlib.rc_context({"svg.hashsalt": "slimqwen", "svg.fonttype": "none"}):
        # Without pyplot, so that no window system is asked for.
        figure = Figure(figsize=(4.5 * len(panels), 4.2), layout="constrained")
        handles: dict[str, Any] = {}
        for panel, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
            for line in panel.lines:
                style = styles[line.label] if line.joined else {**styles[line.label], "linestyle": "none"}
                marker = "o" if len(line.x) <= 20 else ""
                handles[line.label] = axes.errorbar(
                    line.x, line.y, yerr=line.errors, label=line.label, marker=marker, markersize=4, **style
                )
            axes.set_xlabel(panel.x)
            axes.set_ylabel(panel.y)
            axes.grid(alpha=0.3)
        figure.legend(
            handles.values(), handles.keys(), loc="outside lower center", ncols=min(5, len(handles))
        )
        figure.savefig(file, format="svg", metadata={"Date": None})


def vocab_coverage(record: Mapping[str, Any]) -> list[Panel]:
    """Coverage, tokens per byte and bits per byte against the size, a line a source."""
    sizes = sorted(record["sizes"], key=lambda row: row["size"])
    x = [row["size"] for row in sizes]

    def lines(key: str) -> list[Line]:
        return [Line(name, x, [row["sources"][name][key] for row in sizes]) for name in record["sources"]]

    panels = [
        Panel("tokens kept", "share of old tokens kept", lines("coverage")),
        Panel("tokens kept", "tokens per byte, after / before", lines("inflation")),
    ]
    scored = [name for name in record["sources"] if "bits_per_byte" in record["sources"][name]]
    if scored:
        changes = [
            Line(
                name,
                x,
                [row["sources"][name]["bits_per_byte_change"]["value"] for row in sizes],
                [row["sources"][name]["bits_per_byte_change"]["standard_error"] for row in sizes],
            )
            for name in scored
        ]
        panels.append(Panel("tokens kept", "change of bits per byte (bars: 1 SE)", changes))
    return panels


def lm_head(record: Mapping[str, Any]) -> list[Panel]:
    """The head's spectrum and energy against the rank, and bits per byte against bytes."""
    values = record["singular_values"]
    total = sum(value**2 for value in values)
    ranks = list(range(1, len(values) + 1))
    energy = [share / total for share in accumulate(value**2 for value in values)]
    kinds = {
        label: [row for row in record["heads"] if row["kind"] == kind]
        for kind, label in (("low_rank", "low rank, 16 bit"), ("rounded", "4 bit"))
    }
    changes = [
        Line(
            label,
            [row["bytes"] / 1e6 for row in rows],
            [row["bits_per_byte_change"]["value"] for row in rows],
            [row["bits_per_byte_change"]["standard_error"] for row in rows],
        )
        for label, rows in kinds.items()
        if rows
    ]
    whole = Line("16 bit", [record["head"]["bytes"] / 1e6], [0.0], joined=False)
    return [
        Panel(
            "rank",
            "share",
            [
                Line("singular value / largest", ranks, [value / values[0] for value in values]),
                Line("energy", ranks, energy),
            ],
        ),
        Panel("bytes of the head (MB)", "change of bits per byte (bars: 1 SE)", [*changes, whole]),
    ]


def acceptance(record: Mapping[str, Any]) -> list[Panel]:
    """Acceptance length against the depth, a line a class and temperature, and the greedy rates of each position."""
    rows = [row for row in record["depths"] if row["depth"]]
    kinds = dict.fromkeys((one["class"], one["temperature"]) for row in rows for one in row["settings"])
    lengths = []
    for kind in kinds:
        points = [
            (row["depth"], one["length"])
            for row in rows
            for one in row["settings"]
            if (one["class"], one["temperature"]) == kind
        ]
        lengths.append(
            Line(
                f"{kind[0]}, temperature {kind[1]:g}",
                [depth for depth, _ in points],
                [length["value"] for _, length in points],
                [length["standard_error"] for _, length in points],
            )
        )
    name, temperature = next(iter(kinds))
    rates = [
        Line(f"K = {row['depth']}", range(1, row["depth"] + 1), [rate["value"] for rate in one["rates"]])
        for row in rows
        for one in row["settings"]
        if (one["class"], one["temperature"]) == (name, temperature)
    ]
    return [
        Panel("tokens drafted (K)", "acceptance length (tokens, bars: 1 SE)", lengths),
        Panel(
            f"position of the draft ({name}, temperature {temperature:g})", "share accepted up to it", rates
        ),
    ]


def gate_power(record: Mapping[str, Any]) -> list[Panel]:
    """What the responsible gate saw of each seed's damage, beside the undamaged checkpoint."""
    labels = {"fidelity": "mean KL (nats a token)", "acceptance": "acceptance length / baseline's"}
    panels = []
    for gate, label in labels.items():
        kinds = [kind for kind in record["damages"] if kind["gate"] == gate]
        lines = [
            Line(kind["damage"], record["seeds"], [row["value"] for row in kind["rows"]], joined=False)
            for kind in kinds
        ]
        whole = [record["undamaged"][gate]["value"]] * len(record["seeds"])
        panels.append(Panel("seed", label, [*lines, Line("undamaged", record["seeds"], whole)]))
    return panels


def gate_trial(record: Mapping[str, Any]) -> list[Panel]:
    """Each copy's mean divergence and acceptance length beside what the gates allow."""
    copies = ", ".join(f"{place} {row['damage'] or 'the same'}" for place, row in enumerate(record["trials"]))
    labels = {"fidelity": "mean KL (nats a token)", "acceptance": "acceptance length / baseline's"}
    panels = []
    for gate, label in labels.items():
        found = [next(one for one in row["findings"] if one["gate"] == gate) for row in record["trials"]]
        places = list(range(len(found)))
        measured = Line("measured", places, [one["value"] for one in found], joined=False)
        panels.append(
            Panel(copies, label, [measured, Line("limit", places, [one["limit"] for one in found])])
        )
    return panels


def profile(record: Mapping[str, Any]) -> list[Panel]:
    """Seconds of each phase against the prompt's length, and the shares of a step's parts."""
    rows = sorted(record["classes"], key=lambda row: float(row["prompt_tokens"]))
    lengths = [row["prompt_tokens"] for row in rows]
    phases = [
        Line(
            phase,
            lengths,
            [row["seconds"][phase]["value"] for row in rows],
            [row["seconds"][phase]["standard_error"] for row in rows],
        )
        for phase in rows[0]["seconds"]
    ]
    parts = dict.fromkeys(part for row in rows for part in row["step"])
    shares = [Line(part, lengths, [row["step"].get(part, 0.0) for row in rows]) for part in parts]
    return [
        Panel("prompt (tokens)", "seconds of a request (bars: 1 SE)", phases),
        Panel("prompt (tokens)", "share of a step", shares),
    ]


def start_up(record: Mapping[str, Any]) -> list[Panel]:
    """Seconds of each start until the server was ready, of its graphs, and where a median start is after each phase."""
    kinds = [kind for kind in ("cold", "warm", "baked", "eager") if kind in record]

    def lines(seconds: Callable[[Mapping[str, Any]], float]) -> list[Line]:
        return [
            Line(kind, range(1, len(record[kind]) + 1), [seconds(start) for start in record[kind]])
            for kind in kinds
        ]

    panels = [
        Panel("round", "until ready (s)", lines(lambda start: start["ready_seconds"])),
        Panel(
            "round",
            "compiling or loading (s)",
            lines(lambda start: sum(graph["seconds"] for graph in start["graphs"])),
        ),
    ]
    if "phases" in record:
        names = list(record["phases"])
        done = [
            Line(
                kind,
                range(1, len(names) + 1),
                list(accumulate(median(s["phases"][name] for s in record[kind]) for name in names)),
            )
            for kind in kinds
        ]
        numbered = ", ".join(f"{number} {name.replace('_', ' ')}" for number, name in enumerate(names, 1))
        panels.append(Panel(f"after {numbered}", "seconds since the start (medians added up)", done))
    return panels


def redistill_mtp(record: Mapping[str, Any]) -> list[Panel]:
    """The learning curve, and the acceptance of each position before and after."""
    curve = record["learning_curve"]
    trained = [point for point in curve if point["training_loss"] is not None]
    positions = range(1, record["parameters"]["depth"] + 1)
    return [
        Panel(
            "step",
            "divergence from the target (nats a token)",
            [
                Line(
                    "training",
                    [point["step"] for point in trained],
                    [point["training_loss"] for point in trained],
                ),
                Line(
                    "validation",
                    [point["step"] for point in curve],
                    [point["validation_loss"] for point in curve],
                ),
            ],
        ),
        Panel(
            "position of the draft",
            "share accepted up to it",
            [Line(when, positions, record[when]["rates"]) for when in ("before", "after")],
        ),
    ]


def roofline(record: Mapping[str, Any]) -> list[Panel]:
    """Bounds on output tokens per second against the context, a line a variant as it is served."""

    def lines(batch: str) -> list[Line]:
        drawn = []
        for one in record["variants"]:
            depth = one["decode"][-1]["depth"]
            rows = [row for row in one["decode"] if row["depth"] == depth]
            label = one["variant"] + (f", K = {depth}" if depth else "")
            y = [row[batch]["tokens_per_second"] for row in rows]
            drawn.append(Line(label, [row["context"] for row in rows], y))
        return drawn

    what = f"bound on {record['gpu']['name']} (tokens/s)"
    return [
        Panel("context (tokens), 1 sequence", what, lines("one")),
        Panel("context (tokens), as many sequences as served", what, lines("all")),
    ]


def middleware(record: Mapping[str, Any]) -> list[Panel]:
    """Each pair's two times, in the order of measuring."""
    numbers = range(1, len(record["pairs"]) + 1)
    return [
        Panel(
            "pair",
            f"{measure.upper()} (ms)",
            [
                Line(f"{name} middleware", numbers, [pair[name][f"{measure}_ms"] for pair in record["pairs"]])
                for name in ("with", "without")
            ],
        )
        for measure in ("ttft", "tpot")
    ]


def first_request(record: Mapping[str, Any]) -> list[Panel]:
    """First TTFT over the median of the next, and chats by what they found of the rules, a point a round."""
    numbers = range(1, len(record["servers"]["warmed"]) + 1)
    first = [
        Line(
            f"first {kind}, {name}", numbers, [first_requests.first_over_steady(one[kind]) for one in starts]
        )
        for name, starts in record["servers"].items()
        for kind in first_requests.KINDS
    ]
    rounds = record["rules"]["rounds"]
    chats = [
        Line("first chat, rules warm", numbers, [one["first"]["ttft_ms"] for one in rounds]),
        *(
            Line(label, numbers, [first_requests.median_ttft_ms(one[side]) for one in rounds])
            for label, side in (("next chats, rules warm", "warm"), ("chats, rules never seen", "cold"))
        ),
    ]
    return [
        Panel("round", "first TTFT / median of the next", first),
        Panel("round", f"TTFT behind {record['rules']['prefix_tokens']} tokens (ms)", chats),
    ]


_PANELS: Mapping[str, Callable[[Mapping[str, Any]], list[Panel]]] = MappingProxyType(
    {
        "acceptance": acceptance,
        "first_request": first_request,
        "gate_power": gate_power,
        "gate_trial": gate_trial,
        "lm_head": lm_head,
        "middleware": middleware,
        "profile": profile,
        "redistill_mtp": redistill_mtp,
        "roofline": roofline,
        "start_up": start_up,
        "vocab_coverage": vocab_coverage,
    }
)
"""The plot of a kind of record: record -> panels."""
