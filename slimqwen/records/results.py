"""results/: one-off explorations, each a record with its provenance and a plot of it."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slimqwen import checkpoint
from slimqwen.records import plots, provenance, store
from slimqwen.variant import Variant


def read(root: Path, name: str, variant: str) -> dict[str, Any] | None:
    """The record of an exploration of a variant, None where it has not been made."""
    file = root / "results" / f"{name}_{variant}.json"
    if not file.is_file():
        return None
    record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return record


def write(
    name: str,
    one: Variant,
    found: Mapping[str, Any],
    draw: Callable[[Mapping[str, Any]], Sequence[plots.Panel]],
    *,
    command: Sequence[str],
    started: str,
    file: Path | None = None,
    **inputs: Any,
) -> Path:
    """Write results/<name>_<variant>.json and the plot beside it; an exploration made again replaces its record.

    Args:
        name: of the exploration, also its schema's.
        one: the variant whose checkpoint was explored.
        found: the figures.
        draw: record -> panels.
        command: the script and its arguments.
        started: `provenance.utc_now` at the beginning.
        file: instead of results/<name>_<variant>.json.
        inputs: what else decided the figures: digests, seeds.

    Raises:
        RecordError: it breaks its schema, where it has one.

    Returns:
        The record; its plot has the suffix .svg.
    """
    record = {
        "schema": f"{name}/1",
        "variant": one.name,
        **found,
        "provenance": {
            "command": provenance.portable(" ".join(["python", *command]), one.root),
            "started": started,
            "ended": provenance.utc_now(),
            "git": provenance.git_state(one.root),
            "packages": provenance.package_versions(),
            "hardware": provenance.hardware(),
            "checkpoint": checkpoint.digest(one.weights),
            **inputs,
        },
    }
    if store.has_schema(name):
        store.validate(record, f"results/{name}_{one.name}.json")
    file = file or one.root / "results" / f"{name}_{one.name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    plots.write(file.with_suffix(".svg"), draw(record))
    return file
