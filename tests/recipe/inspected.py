"""Stages inspected on the outline of the embedded model, and texts for them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from slimqwen.models.outline import Outline
from slimqwen.recipe import recipe_file
from slimqwen.recipe.inspection import inspect_steps
from tests.checkpoints import TINY

CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def outline_of_tiny(**changes: Any) -> Outline:
    return replace(Outline.read(TINY), **changes)


def faults_of(folder: Path, stages: str, base: Outline | None = None) -> list[str]:
    """The faults of stages on a base, without the path of the file."""
    file = folder / "recipe.yaml"
    file.write_text(f"description: a test\nbase: tiny\nstages:\n{stages}")
    recipe = recipe_file.parse_recipe(file)
    faults, _ = inspect_steps(recipe.steps, base or outline_of_tiny(), folder / "store")
    return [fault.removeprefix(f"{file}:") for fault in recipe.faults + faults]


def write_lines(file: Path, *rows: object) -> Path:
    file.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return file
