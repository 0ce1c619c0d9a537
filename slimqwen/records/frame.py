"""Records as pandas data frames: `slimqwen.records.frame.load()` is one row a figure, of every record there is.

frame = load()
scores = frame[(frame.kind == "quality") & (frame.measure == "exact_match")]
scores.pivot_table("value", "variant", "group", aggfunc="first")
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas  # type: ignore[import-untyped]

from slimqwen.records import provenance, store
from slimqwen.records.collection import Found, collect
from slimqwen.variant import repository_root

COLUMNS = (
    "variant", "kind", "place", "started", "ended", "commit", "dirty", "hardware", "checkpoint", "subject", "group",
    "measure", "value", "standard_error", "low", "high", "count", "unit",
)  # fmt: skip

_NOT_FIGURES = frozenset({"schema", "variant", "items", "provenance", "gpu"})
_SUBJECTS = ("suite", "workload", "plan")
_CONTAINERS = frozenset(
    {"tasks", "classes", "modes", "depths", "settings", "cells", "variants", "heads", "sizes"}
)
"""Fields whose entries have names that say enough."""

_LABELS = (
    "class", "variant", "stage", "gate", "damage", "kind", "name", "figure", "depth", "temperature", "size", "rank",
    "group", "context", "tokens", "step", "seed",
)  # fmt: skip
"""What tells the entries of a list apart, where they have it."""

_OF_AN_ESTIMATE = ("standard_error", "low", "high", "count")
_UNITS = (
    ("tokens_per_second", "tokens/s"), ("tokens_per_s", "tokens/s"), ("_per_s", "1/s"), ("_ms", "ms"),
    ("milliseconds", "ms"), ("seconds", "s"), ("_s", "s"), ("bytes", "bytes"), ("bytes_per_step", "bytes"),
    ("_nats", "nats"), ("bits_per_byte", "bits/byte"), ("bits_per_byte_change", "bits/byte"), ("share", "share"),
    ("exact_match", "share"), ("acc", "share"), ("acc_norm", "share"), ("length", "tokens"), ("tokens", "tokens"),
)  # fmt: skip
"""By what a measure's name ends with; the first that fits."""


def load(root: Path | None = None) -> pandas.DataFrame:
    """Every figure of every readable record of experiments/ and results/; `collect` says what was left out.

    Args:
        root: the repository; by default the one that this package is installed from.

    Returns:
        One row a figure. `group` is the task, class, mode or other place in the record, its parts joined by "/";
        `measure` the figure's name, for statistics of a distribution as `ttft_ms.median`; `subject` the suite,
        workload or plan; `low` and `high` a 95 % interval, where the record holds one; `unit` is empty where the
        name does not tell it. `started` and `ended` are moments in UTC. Rows of newer records come first within a
        variant and kind.
    """
    rows = [
        {**of_record, **figure}
        for found in collect(root or repository_root()).records
        for of_record in (_of_record(found),)
        for figure in _figures(found.record)
    ]
    frame = pandas.DataFrame(rows, columns=list(COLUMNS))
    numbers = ["value", *_OF_AN_ESTIMATE]
    frame[numbers] = frame[numbers].astype("float64")
    for moment in ("started", "ended"):
        frame[moment] = pandas.to_datetime(frame[moment], utc=True)
    return frame


def load_items(kind: str, root: Path | None = None) -> pandas.DataFrame:
    """Every item of every readable record of a kind, such as the answers of all quality records.

    Args:
        kind: of records that have items.
        root: as for `load`.

    Returns:
        One row an item: variant, place of its record, and what the items of that kind hold.

    Raises:
        RecordError: items are damaged.
    """
    rows = [
        {**item, "variant": found.variant, "place": found.place}
        for found in collect(root or repository_root()).of_kind(kind)
        for item in store.read_items(found.path)
    ]
    return pandas.DataFrame(
        rows, columns=list(dict.fromkeys(["variant", "place", *(key for row in rows for key in row)]))
    )


def _of_record(found: Found) -> dict[str, Any]:
    block = found.record["provenance"]
    weights = block.get("checkpoint")
    return {
        "variant": found.variant,
        "kind": found.kind,
        "place": found.place,
        "started": block["started"],
        "ended": block["ended"],
        "commit": block["git"]["commit"],
        "dirty": block["git"]["dirty"],
        "hardware": provenance.hardware_name(block["hardware"]),
        "checkpoint": weights["digest"] if isinstance(weights, Mapping) else weights,
        "subject": next((found.record[key] for key in _SUBJECTS if key in found.record), None),
    }


def _figures(record: store.Record) -> Iterator[dict[str, Any]]:
    for key, value in record.items():
        if key not in _NOT_FIGURES:
            yield from _walk(value, (), key)
    weights = record["provenance"].get("checkpoint")
    if isinstance(weights, Mapping):
        yield _row((), "size_bytes", weights["size_bytes"])


def _walk(value: Any, group: tuple[str, ...], name: str) -> Iterator[dict[str, Any]]:
    """The figures in a part of a record.

    Args:
        value: the part.
        group: where it stands.
        name: its own.
    """
    if _is_number(value):
        yield _row(group, name, value)
    elif isinstance(value, Mapping):
        rest = dict(value)
        if _is_number(value.get("value")):
            # An estimate under its own name, or a task with its measure's.
            within = (*group, name) if "measure" in value else group
            measure = value.get("measure", name)
            yield _row(
                within, measure, rest.pop("value"), {key: rest.pop(key, None) for key in _OF_AN_ESTIMATE}
            )
            group = within
        elif _is_number(value.get("mean")):
            for statistic, figure in value.items():
                if statistic != "standard_error" and _is_number(figure):
                    known = {"standard_error": value.get("standard_error")} if statistic == "mean" else {}
                    yield _row(group, f"{name}.{statistic}", figure, known)
            return
        elif name not in _CONTAINERS:
            group = (*group, name)
        for key, part in rest.items():
            if name in _CONTAINERS and _is_number(part):
                yield _row((*group, key), name, part)
            else:
                yield from _walk(part, group, key)
    elif isinstance(value, list):
        within = group if name in _CONTAINERS else (*group, name)
        for number, part in enumerate(value):
            if isinstance(part, Mapping) and "value" not in part:
                label, rest = _labelled(part, number)
                for key, inner in rest.items():
                    yield from _walk(inner, (*within, label), key)
            else:
                yield from _walk(part, (*group, str(number)), name)


def _labelled(part: Mapping[str, Any], number: int) -> tuple[str, dict[str, Any]]:
    """What tells an entry of a list apart, and the rest of it."""
    told = [key for key in _LABELS if isinstance(part.get(key), str | int | float)]
    label = ", ".join(part[key] if isinstance(part[key], str) else f"{key}={part[key]:g}" for key in told)
    return label or str(number), {key: value for key, value in part.items() if key not in told}


def _row(
    group: tuple[str, ...], measure: str, value: float, known: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    ending = measure.partition(".")[0]
    unit = next((unit for end, unit in _UNITS if ending.endswith(end)), "")
    return {"group": "/".join(group), "measure": measure, "value": value, "unit": unit, **(known or {})}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
