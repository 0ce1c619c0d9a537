"""What two variants differ in: lines of config.env with inheritance applied, stages and their parameters."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from slimqwen.recipe.recipe_file import parse_recipe
from slimqwen.records.table import Table
from slimqwen.variant import Variant


def settings_table(first: Variant, second: Variant) -> Table:
    """Table of the settings in which two variants differ, one row each; "-" where a variant lacks one.

    Raises:
        RecipeError: a recipe cannot be read.
    """
    sides = [dict(_list_settings(each)) for each in (first, second)]
    names = [name for name in {**sides[0], **sides[1]} if sides[0].get(name) != sides[1].get(name)]
    rows = tuple((name, *(side.get(name, "-") for side in sides)) for name in names)
    same = len(sides[0].keys() & sides[1].keys()) - sum(
        1 for name in names if all(name in side for side in sides)
    )
    note = f"{same} settings are the same." if rows else f"All {same} settings are the same."
    title = f"Settings of {first.name} and {second.name}"
    return Table(title, ("setting", first.name, second.name), rows, (note,), text_columns=3)


def _list_settings(variant: Variant) -> Iterator[tuple[str, str]]:
    yield from ((key, setting.value) for key, setting in sorted(variant.settings.items()))
    if variant.recipe is None:
        return
    recipe = parse_recipe(variant.recipe)
    yield "recipe: base", recipe.base
    times: Counter[str] = Counter()
    for number, step in enumerate(recipe.steps, start=1):
        times[step.stage.name] += 1
        again = f" ({times[step.stage.name]})" if times[step.stage.name] > 1 else ""
        stage = f"{step.stage.name}{again}"
        yield stage, f"stage {number}"
        for name, value in _flatten(step.parameters.model_dump(mode="json")):
            yield f"{stage}: {name}", value


def _flatten(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Each leaf of nested mappings as text, with its dotted name."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flatten(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
