"""`slimqwen compare`: two measured variants, paired."""

from typing import Annotated

import typer

from slimqwen import variant as variants
from slimqwen.cli.console import console
from slimqwen.cli.options import RecordsFolder, matching_variants


def compare_variants(
    baseline: Annotated[
        str, typer.Argument(metavar="A", help="the baseline", autocompletion=matching_variants)
    ],
    variant: Annotated[
        str, typer.Argument(metavar="B", help="the variant", autocompletion=matching_variants)
    ],
    records_dir: RecordsFolder = None,
) -> None:
    """Compare two measured variants: scores paired by item, latency as ratios, size of their checkpoints."""
    from slimqwen.report import tables

    subjects = [variants.load(name) for name in (baseline, variant)]
    folders = [records_dir / each.name if records_dir else each.folder for each in subjects]
    for shown in tables.comparison_tables(*folders):
        console.print(shown.as_rich())
