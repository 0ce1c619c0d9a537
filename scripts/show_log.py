"""Show the dated log of results, newest first, negative ones included."""

import argparse

from _console import console, run, table

from slimqwen import variant
from slimqwen.report import history


def main() -> int:
    """Parse, read, show."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", help="of this one alone")
    parser.add_argument("--last", type=int, default=20, help="lines, 0 for all (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.last < 0:
        parser.error(f"--last {arguments.last}: give a number of lines, or 0 for all")
    entries, problems = history.entries(
        variant.repository_root(), variant=arguments.variant, last=arguments.last or None
    )
    shown = table(["ended (UTC)", "variant", "kind", "finding", "commit"], [])
    for entry in entries:
        day = entry.ended.replace("T", " ").removesuffix(":00Z").removesuffix("Z")
        shown.add_row(day, entry.variant or "-", entry.kind, entry.finding, entry.commit)
    console.print(shown)
    for problem in problems:
        console.print(f"left out: {problem.place}: {problem.reason}", markup=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    run(main)
