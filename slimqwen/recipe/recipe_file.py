"""recipe.yaml: a description, the base checkpoint, and the stages that transform it.

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
from slimqwen.recipe.stage import Stage

YamlPath = tuple[int | str, ...]


class RecipeError(SlimqwenError):
    """A recipe.yaml that cannot be used, or a recipe that cannot be run."""


@dataclass(frozen=True)
class Step:
    """One entry under `stages:`."""

    stage: Stage
    parameters: BaseModel


@dataclass(frozen=True)
class Recipe:
    """A validated recipe.yaml, of at least one step; its base is a variant, or owner/name of a hub repository."""

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
    """A loader that refuses a key written twice; plain YAML would drop the first value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Build a mapping whose keys all differ."""
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # refused below
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"{key.value} is written twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_recipe(file: Path, stages: Mapping[str, Stage] = STAGES) -> Recipe:
    """Read and validate a recipe.yaml; paths in it are relative to its folder.

    Raises:
        RecipeError: the file is missing or not YAML, a key is unknown or missing, or a value is invalid; names the
            line, and the nearest known name for an unknown one.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"{file}: cannot be read ({error.strerror}); write a recipe there") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"{file}: not UTF-8 ({error.reason}); convert it") from None
    try:
        content = yaml.load(text, _UniqueKeysLoader)  # a subclass of the safe loader
        root = yaml.compose(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise RecipeError(
            f"{file}:{line}: not usable YAML: {error.problem or error.context}; correct that line"
        ) from None
    except (yaml.YAMLError, ValueError) as error:
        raise RecipeError(f"{file}: not usable YAML: {' '.join(str(error).split())}; correct it") from None
    try:
        document = _Document.model_validate(content)
    except ValidationError as error:
        raise _error(file, root, error, (), _Document) from None
    steps: list[Step] = []
    for number, entry in enumerate(document.stages):
        path: YamlPath = ("stages", number)
        if len(entry) != 1:
            raise RecipeError(
                f"{_line(file, root, path)}: one stage per list entry, this one has {len(entry)}; give each its own '-'"
            )
        [(name, values)] = entry.items()
        path = (*path, name)
        if name not in stages:
            raise RecipeError(f"{_line(file, root, path)}: no stage {name!r}; {_nearest(name, stages)}")
        if steps and steps[-1].stage.last:
            raise RecipeError(
                f"{_line(file, root, path)}: no stage may follow {steps[-1].stage.name}; put that one last"
            )
        follows = stages[name].follows
        if steps and follows and steps[-1].stage.name not in follows:
            raise RecipeError(
                f"{_line(file, root, path)}: {name} reads what {' or '.join(follows)} leaves beside the checkpoint; "
                "put it right after"
            )
        schema = stages[name].parameters
        try:
            parameters = schema.model_validate(values or {}, context={"folder": file.parent})
        except ValidationError as error:
            raise _error(file, root, error, path, schema) from None
        steps.append(Step(stages[name], parameters))
    return Recipe(file, document.description, document.base, tuple(steps))


def _error(
    file: Path, root: yaml.Node | None, error: ValidationError, prefix: YamlPath, schema: type[BaseModel]
) -> RecipeError:
    """One line on the first of the problems that pydantic lists."""
    # A misspelt key is often the reason for a missing one, so it goes first.
    problem = min(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    path = problem["loc"]
    dotted = ".".join(map(str, path)) or "the recipe"
    if problem["type"] == "extra_forbidden":
        fault = f"unknown key {path[-1]!r}; {_nearest(str(path[-1]), _fields(schema, path[:-1]))}"
    elif problem["type"] == "missing":
        fault = f"{dotted} is missing; add it"
    else:
        fault = f"{dotted}: {problem['msg'].removeprefix('Value error, ')}, here is {problem['input']!r}"
    return RecipeError(f"{_line(file, root, (*prefix, *path))}: {fault}")


def _fields(schema: type[BaseModel], path: YamlPath) -> Mapping[str, object]:
    for part in path:
        inner = schema.model_fields[str(part)].annotation
        assert isinstance(inner, type)
        assert issubclass(inner, BaseModel)
        schema = inner
    return schema.model_fields


def _nearest(name: str, names: Mapping[str, object]) -> str:
    similar = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {similar[0]}?" if similar else f"known are {', '.join(sorted(names))}"


def _line(file: Path, node: yaml.Node | None, path: YamlPath) -> str:
    """file:line of the innermost part of a path that exists in the text."""
    line = node.start_mark.line if node else 0
    for part in path:
        if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line
        elif isinstance(node, yaml.MappingNode):
            pair = next(((key, value) for key, value in node.value if key.value == str(part)), None)
            if pair is None:
                break
            line, node = pair[0].start_mark.line, pair[1]
    return f"{file}:{line + 1}"
