"""Train the embedded tiny model from nothing into weights/tiny; an interrupted run continues where it stopped."""

import argparse
from pathlib import Path

from _console import console, progress_bar, run

from slimqwen.tinyworld.build import RECORD, build_tiny
from slimqwen.tinyworld.tasks import TASK_FOLDER, build_items, write_items
from slimqwen.tinyworld.train import standard_plan
from slimqwen.tinyworld.world import World


def main() -> int:
    """Train and measure, or only write the task data."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=Path("weights/tiny"), help="checkpoint folder to replace"
    )
    parser.add_argument(
        "--state", type=Path, default=Path("weights/.tiny-training"), help="where an unfinished run is kept"
    )
    parser.add_argument("--steps", type=int, help="steps in all (default: those of the committed checkpoint)")
    parser.add_argument("--tasks-only", action="store_true", help="only write the test items to eval/tasks")
    arguments = parser.parse_args()
    if arguments.tasks_only:
        write_items(build_items(World()), TASK_FOLDER)
        console.print(f"test items written to {TASK_FOLDER}")
        return 0
    plan = standard_plan() if arguments.steps is None else standard_plan(arguments.steps)
    with progress_bar() as progress:
        record = build_tiny(arguments.output, arguments.state, plan, progress)
    for name, figure in record["metrics"].items():
        console.print(f"{name}: {figure['mean']} ± {figure['standard_error']}")
    for row in record["criteria"]:
        if not row["met"]:
            console.print(f"not met: {row['criterion']} (measured: {row['measured']})")
    console.print(f"written: {arguments.output} (record: {RECORD})")
    return 0


if __name__ == "__main__":
    run(main)
