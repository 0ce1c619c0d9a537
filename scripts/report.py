"""Build the report of all records into report/, or its main charts as SVG files for a README."""

import argparse
from pathlib import Path

from _console import console, errors, progress_bar, run

from slimqwen import variant
from slimqwen.report import site


def main() -> int:
    """Parse, build, say where it is and what it left out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="the folder of the site (default: report/)")
    parser.add_argument("--figures", type=Path, metavar="FOLDER", help="write the main charts there instead")
    arguments = parser.parse_args()

    root = variant.repository_root()
    with progress_bar() as progress:
        if arguments.figures:
            files = site.figures(root, arguments.figures, progress)
        else:
            built = site.build(root, arguments.output or root / "report", progress)
    if arguments.figures:
        for file in files:
            console.print(str(file), markup=False, soft_wrap=True)
        return 0
    for problem in built.problems[:20]:
        errors.print(f"left out: {problem.place}: {problem.reason}", markup=False)
    if len(built.problems) > 20:
        errors.print(f"… and {len(built.problems) - 20} more, on the page")
    console.print(
        f"{built.index}: {built.variants} variants, {built.records} records, {len(built.problems)} files left out",
        markup=False,
        soft_wrap=True,
    )
    return 0


if __name__ == "__main__":
    run(main)
