"""recipe.yaml: a description, the base checkpoint, and the stages that it goes through.

description: AWQ 4-bit MLP weights.
base: tiny
stages:
  - calibrate:
      group_size: 32
"""

import difflib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from slimqwen.errors import SlimqwenError
from slimqwen.recipe.registry import STAGES
from slimqwen.recipe.stage import Parameters, Stage

Location = tuple[int | str, ...]


class RecipeError(SlimqwenError):
    """A recipe.yaml that cannot be used, with its file and line."""


@dataclass(frozen=True)
class Step:
    """One entry under `stages:`."""

    stage: Stage
    parameters: Parameters


@dataclass(frozen=True)
class Recipe:
    """A recipe.yaml that was read and checked.

    Attributes:
        file: where it stands.
        description: what the recipe is for, one sentence or more.
        base: a variant's name, or owner/name of a repository of the model hub.
        steps: the stages in order, at least one.
    """

    file: Path
    description: str
    base: str
    steps: tuple[Step, ...]


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    description: Annotated[str, Field(min_length=1)]
    base: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*(/[\w.-]+)?$")]
    stages: Annotated[list[dict[str, dict[str, Any] | None]], Field(min_length=1)]


class _UniqueKeysLoader(yaml.SafeLoader):
    """A loader that refuses what plain YAML lets pass: a key written twice, of which the first is lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Build a mapping whose keys all differ."""
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value} stands twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read(file: Path, stages: Mapping[str, Stage] = STAGES) -> Recipe:
    """Read and check a recipe.

    Args:
        file: the recipe.yaml; paths in it are relative to its folder.
        stages: what a recipe can name.

    Raises:
        RecipeError: missing file, no YAML, unknown or missing key, bad value; names the line, and for an unknown
            name the nearest known one.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"{file}: cannot be read ({error.strerror}); write a recipe there") from None
    try:
        # A subclass of the safe loader.
        content = yaml.load(text, _UniqueKeysLoader)
        root = yaml.compose(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise RecipeError(
            f"{file}:{line}: not usable YAML: {error.problem or error.context}; mend that line"
        ) from None
    try:
        document = _Document.model_validate(content)
    except ValidationError as error:
        raise _told(file, root, error, (), _Document) from None
    steps: list[Step] = []
    for position, entry in enumerate(document.stages):
        at: Location = ("stages", position)
        if len(entry) != 1:
            raise RecipeError(f"{_place(file, root, at)}: one stage per list entry, here are {len(entry)}")
        [(name, given)] = entry.items()
        if name not in stages:
            raise RecipeError(
                f"{_place(file, root, (*at, name))}: no stage {name!r}; {_nearest(name, stages)}"
            )
        schema = stages[name].parameters
        try:
            parameters = schema.model_validate(given or {}, context={"folder": file.parent})
        except ValidationError as error:
            raise _told(file, root, error, (*at, name), schema) from None
        if steps and steps[-1].stage.last:
            raise RecipeError(
                f"{_place(file, root, (*at, name))}: nothing may follow {steps[-1].stage.name}; put it last"
            )
        steps.append(Step(stages[name], parameters))
    return Recipe(file, document.description, document.base, tuple(steps))


def _told(
    file: Path, root: yaml.Node | None, error: ValidationError, prefix: Location, schema: type[BaseModel]
) -> RecipeError:
    """One line for one of the problems that pydantic found."""
    # A misspelt key is often the cause of a missing one: told first.
    problem = min(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    where = problem["loc"]
    dotted = ".".join(map(str, where)) or "the recipe"
    if problem["type"] == "extra_forbidden":
        what = f"unknown key {where[-1]!r}; {_nearest(str(where[-1]), _fields(schema, where[:-1]))}"
    elif problem["type"] == "missing":
        what = f"{dotted} is missing; add it"
    else:
        what = f"{dotted}: {problem['msg'].removeprefix('Value error, ')}, here is {problem['input']!r}"
    return RecipeError(f"{_place(file, root, (*prefix, *where))}: {what}")


def _fields(schema: type[BaseModel], location: Location) -> Mapping[str, object]:
    for part in location:
        inner = schema.model_fields[str(part)].annotation
        assert isinstance(inner, type)
        assert issubclass(inner, BaseModel)
        schema = inner
    return schema.model_fields


def _nearest(name: str, known: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}"


def _place(file: Path, node: yaml.Node | None, location: Location) -> str:
    """file:line of the innermost part of a location that the text has."""
    line = node.start_mark.line if node else 0
    for part in location:
        if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line
        elif isinstance(node, yaml.MappingNode):
            pair = next(((key, value) for key, value in node.value if key.value == str(part)), None)
            if pair is None:
                break
            line, node = pair[0].start_mark.line, pair[1]
    return f"{file}:{line + 1}"
