"""The named numbers of a record, read from its fields; data frames, MLflow and the leaderboard show these."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

_ESTIMATE_FIELDS = ("standard_error", "low", "high", "count")
_NOT_RESULTS = frozenset({"schema", "variant", "items", "provenance", "gpu", "split"})
_NAMING_CONTAINERS = frozenset(
    {"tasks", "classes", "modes", "depths", "settings", "cells", "variants", "heads", "sizes"}
)
"""Fields whose entries have sufficient names, so that figures leave out the name of the field."""

_LABELS = (
    "class", "variant", "stage", "gate", "damage", "kind", "name", "figure", "depth", "temperature", "size", "rank",
    "group", "context", "tokens", "step", "seed", "batch_size",
)  # fmt: skip
"""Fields that tell the entries of a list apart."""

_UNITS = (
    ("tokens_per_second", "tokens/s"), ("tokens_per_s", "tokens/s"), ("_per_s", "1/s"), ("_ms", "ms"),
    ("milliseconds", "ms"), ("seconds", "s"), ("_s", "s"), ("bytes", "bytes"), ("bytes_per_step", "bytes"),
    ("_nats", "nats"), ("bits_per_byte", "bits/byte"), ("bits_per_byte_change", "bits/byte"), ("share", "share"),
    ("exact_match", "share"), ("acc", "share"), ("acc_norm", "share"), ("length", "tokens"), ("tokens", "tokens"),
)  # fmt: skip
"""Unit by the ending of a figure's name. The first that fits counts: a longer ending stands before a shorter one."""


@dataclass(frozen=True)
class Figure:
    """One number of a record.

    Attributes:
        value: in `unit`.
        unit: empty where the ending of the figure's name gives none.
        standard_error: of the value, in `unit`; this and what follows are None where the record holds none.
        low: lower end of the 95 % interval.
        high: upper end of the interval.
        count: observations that the value is made from.
    """

    value: float
    unit: str = ""
    standard_error: float | None = None
    low: float | None = None
    high: float | None = None
    count: int | None = None


def figures_of(fields: Mapping[str, Any], units: Mapping[str, str]) -> dict[str, Figure]:
    """Every number among the results of a record.

    Args:
        fields: the record as JSON.
        units: unit by the ending of a field's name, before the endings that all kinds share.

    Returns:
        Figures by name: the parts of the record around the number, then its own name, joined by "/"; a statistic of a
        distribution is named such as `ttft_ms.median`.
    """
    results = {key: value for key, value in fields.items() if key not in _NOT_RESULTS}
    figures = dict(pair for key, value in results.items() for pair in _walk(value, (), key))
    return {name: replace(figure, unit=_unit_of(name, units)) for name, figure in figures.items()}


def _unit_of(name: str, units: Mapping[str, str]) -> str:
    ending = name.rpartition("/")[2].partition(".")[0]
    return next((unit for end, unit in (*units.items(), *_UNITS) if ending.endswith(end)), "")


def _walk(value: Any, group: tuple[str, ...], name: str) -> Iterator[tuple[str, Figure]]:
    """The figures in one part of a record, still without units.

    Args:
        group: names of the parts around it.
    """
    if _is_number(value):
        yield _named_figure(group, name, value)
    elif isinstance(value, Mapping):
        yield from _walk_mapping(value, group, name)
    elif isinstance(value, list):
        list_group = group if name in _NAMING_CONTAINERS else (*group, name)
        for number, part in enumerate(value):
            if isinstance(part, Mapping) and "value" not in part:
                label, rest = _label_and_rest(part, number)
                for key, inner in rest.items():
                    yield from _walk(inner, (*list_group, label), key)
            else:
                # Two lists of estimates with limits beside them must not share a name.
                part_group = list_group if isinstance(part, Mapping) else group
                yield from _walk(part, (*part_group, str(number)), name)


def _walk_mapping(
    value: Mapping[str, Any], group: tuple[str, ...], name: str
) -> Iterator[tuple[str, Figure]]:
    rest = dict(value)
    if _is_number(value.get("value")):
        # An estimate has its field's name, a task the name of its measure.
        group = (*group, name) if "measure" in value else group
        estimate = {key: rest.pop(key, None) for key in _ESTIMATE_FIELDS}
        yield _named_figure(group, value.get("measure", name), rest.pop("value"), **estimate)
    elif _is_number(value.get("mean")):
        for statistic, figure in value.items():
            if statistic != "standard_error" and _is_number(figure):
                error = {"standard_error": value.get("standard_error")} if statistic == "mean" else {}
                yield _named_figure(group, f"{name}.{statistic}", figure, **error)
        return
    elif name not in _NAMING_CONTAINERS:
        group = (*group, name)
    for key, part in rest.items():
        if name in _NAMING_CONTAINERS and _is_number(part):
            yield _named_figure((*group, key), name, part)
        else:
            yield from _walk(part, group, key)


def _label_and_rest(part: Mapping[str, Any], number: int) -> tuple[str, dict[str, Any]]:
    """The label of a list's entry, and the fields of the entry that are not in the label."""
    keys = [key for key in _LABELS if isinstance(part.get(key), str | int | float)]
    label = ", ".join(part[key] if isinstance(part[key], str) else f"{key}={part[key]:g}" for key in keys)
    return label or str(number), {key: value for key, value in part.items() if key not in keys}


def _named_figure(group: tuple[str, ...], name: str, value: float, **estimate: Any) -> tuple[str, Figure]:
    return "/".join((*group, name)), Figure(value, **estimate)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
