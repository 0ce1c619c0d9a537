"""Fill the table blocks of the Markdown files from the records, or check that they agree with them."""

import argparse

import _console

from slimqwen import variant
from slimqwen.report import tables


def main() -> int:
    """Parse, then write or compare: 1 where --check finds a difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 if a table is out of date"
    )
    arguments = parser.parse_args()

    root = variant.repository_root()
    wrong = tables.outdated(root)
    for file, fresh in wrong.items():
        if not arguments.check:
            file.write_text(fresh, encoding="utf-8")
        state = (
            "differs from its records, run `python scripts/readme_tables.py`"
            if arguments.check
            else "rewritten"
        )
        _console.console.print(f"{file.relative_to(root)}: {state}", soft_wrap=True)
    return 1 if wrong and arguments.check else 0


if __name__ == "__main__":
    _console.run(main)
