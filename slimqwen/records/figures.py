"""Reads the named numbers of a record from its fields; data frames, MLflow and the leaderboard show them."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

_ESTIMATE_FIELDS = ("standard_error", "low", "high", "count")
_NOT_RESULTS = frozenset({"schema", "variant", "items", "provenance", "gpu", "split"})
_LABELS = (
    "class", "variant", "stage", "gate", "kind", "name", "figure", "depth", "temperature", "size", "rank",
    "group", "context", "tokens", "step", "seed", "batch_size",
)  # fmt: skip
"""Fields that label the entries of a list."""

_UNITS = (
    ("tokens_per_second", "tokens/s"), ("tokens_per_s", "tokens/s"), ("_per_s", "1/s"), ("_ms", "ms"),
    ("milliseconds", "ms"), ("seconds", "s"), ("_s", "s"), ("bytes", "bytes"), ("bytes_per_step", "bytes"),
    ("_nats", "nats"), ("bits_per_byte", "bits/byte"), ("bits_per_byte_change", "bits/byte"), ("share", "share"),
    ("exact_match", "share"), ("acc", "share"), ("acc_norm", "share"), ("length", "tokens"), ("tokens", "tokens"),
)  # fmt: skip
"""Unit by the ending of a figure's name; the first ending that fits counts, so longer endings come first."""


@dataclass(frozen=True)
class Figure:
    """One number of a record.

    Attributes:
        value: the number, in `unit`.
        unit: unit of the value; empty if the ending of the figure's name gives none.
        standard_error: standard error of the value, in `unit`; None if the record has none.
        low: lower end of the 95 % interval; None if the record has none.
        high: upper end of the 95 % interval; None if the record has none.
        count: number of observations behind the value; None if the record has none.
    """

    value: float
    unit: str = ""
    standard_error: float | None = None
    low: float | None = None
    high: float | None = None
    count: int | None = None


def figures_of(fields: Mapping[str, Any], units: Mapping[str, str]) -> dict[str, Figure]:
    """Read every number among the results of a record.

    Args:
        fields: the record as JSON.
        units: the kind's own units by the ending of a field's name; they precede those that all kinds share.

    Returns:
        Figures by name: the names of the enclosing fields and of the number itself, joined by "/", such as
        `classes/short/ttft_ms/median`; an estimate has the name of its field.
    """
    results = {key: value for key, value in fields.items() if key not in _NOT_RESULTS}
    return {
        "/".join(path): replace(figure, unit=_unit_of(path, units)) for path, figure in _walk(results, ())
    }


def _unit_of(path: Sequence[str], units: Mapping[str, str]) -> str:
    """Unit by the ending of the last name, or of the name before it (`ttft_ms` in `ttft_ms/median`)."""
    for name in reversed(path[-2:]):
        for ending, unit in (*units.items(), *_UNITS):
            if name.endswith(ending):
                return unit
    return ""


def _walk(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Figure]]:
    """Yield the figures in one part of a record, still without units.

    Args:
        path: names of the enclosing parts.
    """
    if _is_number(value):
        yield path, Figure(value)
    elif isinstance(value, list):
        entries = [_label_and_rest(part) if isinstance(part, Mapping) else ("", part) for part in value]
        shared = Counter(label for label, _ in entries)
        for number, (label, rest) in enumerate(entries):
            own_label = label if shared[label] == 1 else f"{label}, {number}"
            yield from _walk(rest, (*path, own_label if label else str(number)))
    elif isinstance(value, Mapping):
        rest = dict(value)
        if _is_number(rest.get("value")):
            name = (*path, str(rest["measure"])) if "measure" in rest else path
            yield name, Figure(rest.pop("value"), **{key: rest.pop(key, None) for key in _ESTIMATE_FIELDS})
        for key, part in rest.items():
            yield from _walk(part, (*path, key))


def _label_and_rest(part: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Label of an entry of a list, and the entry's other fields."""
    keys = [key for key in _LABELS if isinstance(part.get(key), str | int | float)]
    label = ", ".join(part[key] if isinstance(part[key], str) else f"{key}={part[key]:g}" for key in keys)
    return label, {key: value for key, value in part.items() if key not in keys}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
