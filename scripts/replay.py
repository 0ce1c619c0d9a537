"""Measure again what made a record, and say whether it comes out the same.

Exits 0 where every answer is reproduced, or the ratio of times has 1.00 within its interval; 1 where it comes out
otherwise; 2 where it cannot be measured again; make turns all but 0 into 2.
"""

import argparse
import sys
from pathlib import Path

from _console import console, progress_bar, run, table

from slimqwen.evaluation import replay


def main() -> int:
    """Parse, replay, show."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", type=Path, help="such as experiments/tiny-awq/quality_….json")
    parser.add_argument("--port", type=int, help="of a server that runs already, or to be started")
    arguments = parser.parse_args()
    with progress_bar() as progress:
        found = replay.replay(
            arguments.record.resolve(), command=sys.argv, port=arguments.port, progress=progress
        )
    shown = table(["figure"], ("then", "now", "change [95 %]", "no change inside", "of"))
    for change in found.changes:
        figures = (
            f"{change.value:.2f}x [{change.low:.2f}, {change.high:.2f}]"
            if change.none
            else f"{change.value:+.4f} [{change.low:+.4f}, {change.high:+.4f}]"
        )
        inside = "yes" if change.none_inside else "no"
        shown.add_row(
            change.name, f"{change.before:,.4g}", f"{change.after:,.4g}", figures, inside, str(change.count)
        )
    console.print(shown)
    console.print(found.summary, markup=False, soft_wrap=True)
    if found.differences:
        console.print("not as it was then:")
        for difference in found.differences:
            console.print(f"  {difference}", markup=False, soft_wrap=True)
    else:
        console.print("checkpoint, data, flags, hardware, versions and commit are what they were then")
    console.print(f"record: {found.repetition}", markup=False, soft_wrap=True)
    return 0 if found.reproduced else 1


if __name__ == "__main__":
    run(main)
