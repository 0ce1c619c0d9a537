"""Writes the recipe.yaml of a new variant: its text, and its stages in order with every parameter and its meaning."""

import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from slimqwen.recipe.parameters import Parameter, list_parameters
from slimqwen.recipe.recipe_file import RecipeError, stage_fault
from slimqwen.recipe.registry import STAGES
from slimqwen.text.corpus import SELF
from slimqwen.variant import Variant

_WIDTH = 120


def render_recipe(base: Variant, stages: Sequence[str], corpus: str = str(SELF)) -> str:
    """Content of a recipe.yaml with the given stages and the checkpoint of `base`.

    Args:
        corpus: the text of all stages: self, a name of eval/corpora or eval/texts, or a path relative to the recipe.

    Raises:
        slimqwen.recipe.recipe_file.RecipeError: a stage is unknown, or the order is impossible.
    """
    lines = [
        f"description: The checkpoint of {base.name} through {', '.join(stages)}.",
        f"base: {base.name}",
        "# The text of each stage that names none: self (the model writes it), general (`slimqwen download`",
        "#   fetches it), or a file or folder relative to this one.",
        f"corpus: {corpus}",
        "stages:",
    ]
    for previous, stage in pairwise(["", *stages]):
        if fault := stage_fault(stage, previous):
            raise RecipeError(f"--stage: {fault}")
        lines.append(f"  - {stage}:")
        # Of a model's own text nothing can be pruned.
        path = "general" if corpus == str(SELF) and stage == "prune_vocab" else None
        lines += _render_parameters(list_parameters(STAGES[stage].parameters), 6, path)
    return "\n".join(lines) + "\n"


def _render_parameters(parameters: Iterable[Parameter], indent: int, path: str | None) -> Iterator[str]:
    for parameter in parameters:
        if parameter.name == _TEXT:
            if path:
                yield f"{' ' * indent}{_TEXT}: {path}"
            continue
        comment = "; ".join(part for part in (parameter.meaning, parameter.allowed) if part)
        margin = " " * indent
        yield from textwrap.wrap(
            comment, _WIDTH, initial_indent=f"{margin}# ", subsequent_indent=f"{margin}#   "
        )
        if parameter.parts:
            yield f"{margin}{parameter.name}:"
            yield from _render_parameters(parameter.parts, indent + 2, path)
        else:
            value = parameter.value
            shown = "" if value is None else f" {_written(value)}"
            yield f"{margin}{parameter.name}:{shown}"


_TEXT = "path"
"""Parameter of a `TextSource` that the recipe's `corpus` gives."""


def _written(value: object) -> str:
    """A value as YAML text."""
    if isinstance(value, tuple):
        return json.dumps(value)
    return str(value).lower() if isinstance(value, bool) else f"{value}"
