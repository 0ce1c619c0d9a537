"""`slimqwen world`: the embedded model and the items that it is tested on."""

from pathlib import Path
from typing import Annotated

import typer

from slimqwen import variant
from slimqwen.cli.console import progress_bar, relative, say

app = typer.Typer(help="Train the embedded model, write its test items.", no_args_is_help=True)

_WEIGHTS = variant.repository_root() / "weights"


@app.command()
def train(
    output: Annotated[Path, typer.Option(help="checkpoint folder to replace")] = _WEIGHTS / "tiny",
    state: Annotated[Path, typer.Option(help="folder of an unfinished run")] = _WEIGHTS / ".tiny-training",
    steps: Annotated[
        int | None, typer.Option(help="optimiser steps (default: those of the committed checkpoint)")
    ] = None,
) -> None:
    """Train the embedded model from scratch (30 minutes); an interrupted run continues where it stopped."""
    from slimqwen.tinyworld.build import RECORD, build_tiny
    from slimqwen.tinyworld.train import standard_plan

    plan = standard_plan() if steps is None else standard_plan(steps)
    with progress_bar() as progress:
        record = build_tiny(output, state, plan, progress)
    for name, figure in record["metrics"].items():
        say(f"{name}: {figure['mean']} ± {figure['standard_error']}")
    for row in record["criteria"]:
        if not row["met"]:
            say(f"not met: {row['criterion']} (measured: {row['measured']})")
    say(f"written: {relative(output)} (record: {RECORD})")


@app.command()
def tasks() -> None:
    """Write the test items to eval/tasks/tinyworld."""
    from slimqwen.tinyworld.tasks import TASK_FOLDER, build_items, write_items
    from slimqwen.tinyworld.world import World

    folder = variant.repository_root() / TASK_FOLDER
    write_items(build_items(World()), folder)
    say(f"test items written to {relative(folder)}")
