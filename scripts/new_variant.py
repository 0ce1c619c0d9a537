"""Create experiments/<name>/: a planned variant that passes every check, ready for its flags or its recipe."""

import argparse

from _console import console, run
from _readmes import bring_up_to_date

from slimqwen import scaffold, variant


def main() -> int:
    """Parse, create, bring the tables that list all variants up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", required=True)
    parser.add_argument("--base", required=True, help="the variant whose flags and checkpoint it starts from")
    parser.add_argument(
        "--hypothesis", required=True, help="what it is expected to show, one sentence that can be refuted"
    )
    parser.add_argument(
        "--stages", nargs="*", default=[], help="of a recipe that makes weights of its own, in order"
    )
    arguments = parser.parse_args()
    root = variant.repository_root()
    folder = scaffold.create(arguments.name, arguments.base, arguments.hypothesis, stages=arguments.stages)
    for file in sorted(folder.iterdir()):
        console.print(f"written: {file.relative_to(root)}", markup=False)
    bring_up_to_date(root)
    return 0


if __name__ == "__main__":
    run(main)
