"""Tables of how two variants differ: tensors, config and tokenizer, flags."""

from collections.abc import Mapping, Sequence
from textwrap import shorten
from typing import Any

from slimqwen import checkpoint
from slimqwen.checkpoint import difference
from slimqwen.checkpoint.difference import Change, TensorDifference
from slimqwen.checkpoint.files import sha256, side_files
from slimqwen.progress import Progress, silent
from slimqwen.recipe import variant_recipe
from slimqwen.records.table import Table
from slimqwen.variant import Variant

_SHOWN_NAMES = 10
_SHOWN_CHARACTERS = 60


def tables(first: Variant, second: Variant, progress: Progress = silent) -> list[Table]:
    """How the second variant differs from the first; a table without rows is left out.

    Args:
        progress: receives (activity, done, total) in tensors.

    Raises:
        MissingCheckpointError, CorruptCheckpointError: a checkpoint is missing or damaged.
    """
    for side in (first, second):
        side.require_weights()
    differences = difference.compare(first.weights, second.weights, progress)
    flags = [{key: setting.value for key, setting in side.settings.items()} for side in (first, second)]
    candidates = [_tensors_table(first, second, differences)]
    candidates += [
        _values_table(title, (first.name, second.name), *values)
        for title, values in (
            ("config.json", [_flat(checkpoint.read_config(side.weights)) for side in (first, second)]),
            ("Files beside the tensors, SHA-256", [_side_files(side) for side in (first, second)]),
            ("config.env", flags),
        )
    ]
    return [table for table in candidates if table.rows]


def _tensors_table(first: Variant, second: Variant, differences: Sequence[TensorDifference]) -> Table:
    groups: dict[tuple[str, Change], list[TensorDifference]] = {}
    for tensor in differences:
        groups.setdefault((tensor.kind, tensor.change), []).append(tensor)
    rows = []
    for (kind, change), group in sorted(groups.items(), key=lambda item: item[0]):
        largest = max(group, key=lambda tensor: tensor.deviation or 0.0)
        deviates = bool(largest.deviation)
        rows.append(
            (
                kind,
                str(change),
                str(len(group)),
                f"{largest.deviation:.3g}" if deviates else "-",
                largest.name if deviates else "-",
            )
        )
    return Table(
        f"Tensors of {second.name}, compared with {first.name}",
        ("part", "change", "tensors", "largest deviation", "of"),
        tuple(rows),
        notes=(
            "Deviation: root mean square of the difference relative to that of the tensor, packed weights dequantised.",
            "A scale that AWQ moves from one tensor into another is a deviation of both, and no loss.",
            *_recipe_notes(second),
        ),
        text_columns=2,
    )


def _recipe_notes(variant: Variant) -> list[str]:
    """The changes that the variant's recipe does not explain; empty without a recipe."""
    if variant.recipe is None:
        return []
    names = [tensor.name for tensor in variant_recipe.unexplained_changes(variant)]
    base = variant_recipe.read(variant).base
    if not names:
        return [
            f"Every tensor that differs from {base} is one that a stage of {variant.name}'s recipe changes."
        ]
    others = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return [
        f"Changed from {base} by no stage of {variant.name}'s recipe: {', '.join(names[:_SHOWN_NAMES])}{others}."
    ]


def _values_table(
    title: str, names: tuple[str, str], first: Mapping[str, str], second: Mapping[str, str]
) -> Table:
    return Table(
        title,
        ("key", *names),
        tuple(
            (key, *(shorten(side.get(key, "-"), _SHOWN_CHARACTERS) for side in (first, second)))
            for key in sorted(first.keys() | second.keys())
            if first.get(key) != second.get(key)
        ),
        text_columns=3,
    )


def _flat(value: Any, prefix: str = "") -> dict[str, str]:
    """The leaves of a JSON object that are not null as text, by dotted key."""
    if not isinstance(value, dict):
        return {} if value is None else {prefix: str(value)}
    return {
        name: text
        for key, inner in value.items()
        for name, text in _flat(inner, f"{prefix}.{key}" if prefix else key).items()
    }


def _side_files(variant: Variant) -> dict[str, str]:
    return {name: sha256(path)[:16] for name, path in side_files(variant.weights).items()}
