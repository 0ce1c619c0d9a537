"""Runs an exploration: a one-off analysis of a variant's checkpoint, whose result is no record.

It prints a table and writes results/explorations/<name>_<variant>.json.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import typer

from slimqwen import variant as variants
from slimqwen.errors import SlimqwenError
from slimqwen.records import provenance
from slimqwen.records.table import Table
from slimqwen.variant import Variant

Explore = Callable[[Variant, argparse.Namespace], tuple[Table, dict[str, Any]]]
"""(variant, parsed options) -> the table to print, and the figures to write."""


def run_exploration(
    name: str, parser: argparse.ArgumentParser, explore: Explore, arguments: Sequence[str] | None = None
) -> None:
    """Explore the variant that --variant names: print the table, and write the figures with their provenance.

    An expected error prints one line on stderr, and ends the process with exit code 2.

    Args:
        name: beginning of the name of the file that is written.
        parser: parser of the exploration's own options; --variant is added to it.
        explore: function of the variant and the parsed options that returns the table and the figures.
        arguments: words of the command line; None for those of this process.
    """
    parser.add_argument("--variant", required=True, help="folder of experiments/ whose checkpoint is read")
    options = parser.parse_args(arguments)
    started = provenance.utc_now()
    try:
        variant = variants.load(options.variant)
        variant.require_weights()
        table, figures = explore(variant, options)
        block = provenance.of_variant(variant, sys.argv, started).model_dump(mode="json", by_alias=True)
    except SlimqwenError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    file = variant.root / "results" / "explorations" / f"{name}_{variant.name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"provenance": block, **figures}, indent=1) + "\n", encoding="utf-8")
    typer.echo(table.as_markdown())
    typer.echo(f"figures: {file.relative_to(variant.root)}")
