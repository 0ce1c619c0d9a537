"""How weights/tiny, its test items and its texts were made: `python tools/tinyworld {train,tasks,texts}`.

Training takes half an hour on two cores; an interrupted run continues where it stopped. `slimqwen eval` scores the
result. Nothing in the library reads this folder.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tinyworld.build import build_tiny
from tinyworld.tasks import TASK_FOLDER, build_items, write_items
from tinyworld.texts import write_texts
from tinyworld.train import standard_plan
from tinyworld.world import World

ROOT = Path(__file__).resolve().parents[2]


def show(activity: str, done: float, total: float) -> None:
    """Show progress on one line of standard error."""
    print(f"\r{activity}: {done:g} of {total:g}  ", end="", file=sys.stderr, flush=True)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("what", choices=["train", "tasks", "texts"])
parser.add_argument(
    "--output", type=Path, default=ROOT / "weights" / "tiny", help="checkpoint folder to replace"
)
parser.add_argument("--steps", type=int, default=standard_plan().steps, help="optimiser steps")
arguments = parser.parse_args()
if arguments.what == "train":
    state = arguments.output.with_name(f".{arguments.output.name}-training")
    build_tiny(arguments.output, state, standard_plan(arguments.steps), show)
elif arguments.what == "tasks":
    write_items(build_items(World()), ROOT / TASK_FOLDER)
else:
    write_texts(ROOT / "eval" / "texts")
