"""Writes the recipe.yaml of a new variant: its stages in order, with every parameter, its default and its meaning."""

import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from slimqwen.recipe.parameters import Parameter, list_parameters
from slimqwen.recipe.recipe_file import RecipeError, stage_fault
from slimqwen.recipe.registry import STAGES
from slimqwen.variant import Variant

UNFILLED = "# fill in, such as ../../corpora/NAME.jsonl"
"""Placeholder in a new recipe for the path of a text, which is relative to the recipe."""

_WIDTH = 120


def render_recipe(base: Variant, stages: Sequence[str]) -> str:
    """Content of a recipe.yaml with the given stages and the checkpoint of `base`.

    The paths of the stages' texts are left to be filled in.

    Raises:
        slimqwen.recipe.recipe_file.RecipeError: a stage is unknown, or the order is impossible.
    """
    lines = [
        f"description: The checkpoint of {base.name} through {', '.join(stages)}.",
        f"base: {base.name}",
        "stages:",
    ]
    for previous, stage in pairwise(["", *stages]):
        if fault := stage_fault(stage, previous):
            raise RecipeError(f"--stage: {fault}")
        lines.append(f"  - {stage}:")
        lines += _render_parameters(list_parameters(STAGES[stage].parameters), 6)
    return "\n".join(lines) + "\n"


def _render_parameters(parameters: Iterable[Parameter], indent: int) -> Iterator[str]:
    for parameter in parameters:
        comment = "; ".join(part for part in (parameter.meaning, parameter.allowed) if part)
        margin = " " * indent
        yield from textwrap.wrap(
            comment, _WIDTH, initial_indent=f"{margin}# ", subsequent_indent=f"{margin}#   "
        )
        if parameter.parts:
            yield f"{margin}{parameter.name}:"
            yield from _render_parameters(parameter.parts, indent + 2)
        elif parameter.name == _TEXT:
            yield f"{margin}{parameter.name}:  {UNFILLED}"
        else:
            value = parameter.value
            shown = "" if value is None else f" {_written(value)}"
            yield f"{margin}{parameter.name}:{shown}"


_TEXT = "path"
"""Parameter of a `TextSource` that has no default."""


def _written(value: object) -> str:
    """A value as YAML text."""
    if isinstance(value, tuple):
        return json.dumps(value)
    return str(value).lower() if isinstance(value, bool) else f"{value}"
