"""results/: one-off explorations, each a record with its provenance and a plot of it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slimqwen import checkpoint
from slimqwen.records import plots, provenance, store
from slimqwen.variant import Variant


def read(root: Path, name: str, variant: str) -> dict[str, Any] | None:
    """The record of an exploration of a variant in its present form, None where it has not been made.

    Raises:
        RecordError: the file is no record, or breaks its schema.
    """
    file = root / "results" / f"{name}_{variant}.json"
    return store.read(file) if file.is_file() else None


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

    Git keeps the record that was replaced.

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
        RecordError: it breaks its schema, or has none; nothing is written.

    Returns:
        The record; its plot has the suffix .svg.
    """
    record = {
        "schema": f"{name}/1",
        "variant": one.name,
        **found,
        "provenance": {
            "schema": "provenance/2",
            "command": provenance.shell_command(command, one.root),
            "started": started,
            "ended": provenance.utc_now(),
            "git": provenance.git_state(one.root),
            "threads": provenance.threads({}),
            "packages": provenance.package_versions(),
            "hardware": provenance.hardware(),
            "checkpoint": checkpoint.digest(one.weights),
            **inputs,
        },
    }
    file = file or one.root / "results" / f"{name}_{one.name}.json"
    text = store.serialise(record, store.place(file))
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f".{file.name}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(file)
    plots.write(file.with_suffix(".svg"), draw(record))
    return file
