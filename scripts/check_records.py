"""Check every record of experiments/ and results/, and what the READMEs say of them; change nothing.

Exits 0 where all is well, 1 where something is wrong.
"""

import argparse
from pathlib import Path

from _console import console, run, table
from rich.markup import escape

from slimqwen import variant
from slimqwen.report import checks


def main() -> int:
    """Parse, check, show a line a fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=variant.repository_root(), help="another repository")
    found = checks.check(parser.parse_args().root.resolve())
    if found.faults:
        shown = table(["place", "what is wrong", "what to do"], [])
        for fault in found.faults:
            shown.add_row(*map(escape, (fault.place, fault.wrong, fault.cure)))
        shown.columns[0].overflow = "fold"  # a path that is cut cannot be opened
        console.print(shown)
    for note in found.notes:
        console.print(note, markup=False, soft_wrap=True)
    state = f"{len(found.faults)} faults" if found.faults else "no fault"
    console.print(f"{found.records} records, {state}")
    return 1 if found.faults else 0


if __name__ == "__main__":
    run(main)
