"""Compare two measured variants: scores paired by item, latency as ratios, and the size of their checkpoints."""

import argparse
from pathlib import Path

import _console

from slimqwen import variant
from slimqwen.report import tables


def main() -> int:
    """Parse, compare, show."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("variants", nargs=2, metavar="VARIANT", help="the baseline, then the other")
    parser.add_argument(
        "--records-dir", type=Path, help="read DIR/<variant>/ instead of experiments/<variant>/"
    )
    arguments = parser.parse_args()

    folders = [
        arguments.records_dir / one.name if arguments.records_dir else one.folder
        for one in map(variant.load, arguments.variants)
    ]
    for table in tables.comparison_tables(*folders):
        _console.console.print(table.as_rich())
    return 0


if __name__ == "__main__":
    _console.run(main)
