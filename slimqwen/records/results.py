"""results/: one-off explorations, each a record with its provenance and a plot of it."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slimqwen import checkpoint
from slimqwen.records import plots, provenance
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
        inputs: what else decided the figures: digests, seeds.

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
    file = one.root / "results" / f"{name}_{one.name}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    plots.write(file.with_suffix(".svg"), draw(record))
    return file
