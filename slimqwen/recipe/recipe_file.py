"""Reads recipe.yaml: a description, the base checkpoint, and the stages that transform it, as in this example.

description: AWQ 4-bit MLP weights.
base: tiny
stages:
  - calibrate:
      group_size: 32
  - prune_vocab:
      size: 50%
  - quantise_lm_head
"""

import difflib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from slimqwen import variant as variants
from slimqwen.errors import SlimqwenError
from slimqwen.recipe.registry import STAGES
from slimqwen.recipe.stage import Fault, Stage

YamlPath = tuple[int | str, ...]


class RecipeError(SlimqwenError):
    """A recipe.yaml cannot be used, or a recipe cannot be run."""

    @classmethod
    def of_faults(cls, faults: Sequence[str]) -> "RecipeError":
        """Make an error of one line for a single fault, or with a heading and a line for each of several."""
        if len(faults) == 1:
            return cls(faults[0])
        return RecipeFaultsError(
            "\n  ".join([f"{len(faults)} faults in the recipe, nothing has run:", *faults])
        )


class RecipeFaultsError(RecipeError):
    """All faults of a recipe, a line each with its location: the only expected error of more than one line."""


@dataclass(frozen=True)
class Step:
    """One entry under `stages:`.

    Attributes:
        places: file:line of each parameter in the recipe, by its dotted name; under `""`, that of the stage.
        is_whole: whether the parameters are all those of the recipe; False if faulty ones were left out.
    """

    stage: Stage
    parameters: BaseModel
    places: Mapping[str, str] = field(default_factory=dict, repr=False)
    is_whole: bool = True

    def located(self, fault: Fault) -> str:
        """A fault of the step as one line, with file and line of its parameter, or of the part that contains it."""
        name = fault.field
        while name and name not in self.places:
            name = name.rpartition(".")[0]
        place = self.places.get(name)
        return f"{place}: {self.stage.name}: {fault.text}" if place else fault.text


@dataclass(frozen=True)
class Recipe:
    """A recipe.yaml of at least one step.

    Attributes:
        base: name of a variant, or owner/name or owner/name@commit of a hub repository.
        steps: the stages with their parameters; without stages that cannot be understood.
        faults: faults of the file, a line each with its location.
    """

    file: Path
    description: str
    base: str
    steps: tuple[Step, ...]
    faults: tuple[str, ...] = ()


_Entry = Annotated[
    dict[str, dict[str, Any] | None],
    BeforeValidator(lambda entry: {entry: None} if isinstance(entry, str) else entry),  # `- calibrate`
]


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    description: Annotated[str, Field(min_length=1)]
    base: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*(/[\w.-]+(@[0-9a-f]{40})?)?$")]
    stages: Annotated[list[_Entry], Field(min_length=1)]


class _UniqueKeysLoader(yaml.SafeLoader):
    """A YAML loader that refuses a key that is written twice, of which plain YAML would drop the first value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Build a mapping; an error if a key is written twice."""
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
    """Read and validate a recipe.yaml, in which paths are relative to its folder.

    Raises:
        RecipeError: as `parse_recipe`; or the recipe has faults.
    """
    recipe = parse_recipe(file, stages)
    if recipe.faults:
        raise RecipeError.of_faults(recipe.faults)
    return recipe


def parse_recipe(file: Path, stages: Mapping[str, Stage] = STAGES) -> Recipe:
    """Read a recipe.yaml; faults such as unknown keys and invalid values are collected in `Recipe.faults`.

    Raises:
        RecipeError: the file cannot be read, is not YAML, or lacks one of a recipe's three keys.
    """
    content, root = _load_yaml(file)
    text = _RecipeText(file, root)
    try:
        document = _Document.model_validate(content)
    except ValidationError as error:
        raise RecipeError.of_faults([*text.faults_of(error, (), _Document)]) from None
    steps: list[Step] = []
    faults: list[str] = []
    previous = ""
    for number, entry in enumerate(document.stages):
        path: YamlPath = ("stages", number)
        if len(entry) != 1:
            faults.append(
                f"{text.place(path)}: one stage per list entry, this one has {len(entry)}; give each its own '-'"
            )
            continue
        [(name, values)] = entry.items()
        path = (*path, name)
        if fault := stage_fault(name, previous, stages):
            faults.append(f"{text.place(path)}: {fault}")
        previous = name
        if name not in stages:
            continue
        schema = stages[name].parameters
        try:
            parameters = schema.model_validate(values or {}, context={"folder": file.parent})
            steps.append(Step(stages[name], parameters, text.places(path)))
        except ValidationError as error:
            faults += text.faults_of(error, path, schema)
            if (rest := _without_faults(schema, values or {}, error, file.parent)) is not None:
                steps.append(Step(stages[name], rest, text.places(path), is_whole=False))
    return Recipe(file, document.description, document.base, tuple(steps), tuple(faults))


def find_base_variant(base: str, root: Path) -> str:
    """Name of the variant that a recipe's base denotes: `base` itself, or the variant that copies that hub repository.

    Raises:
        RecipeError: no variant is a copy of the repository at the commit that `base` names.
    """
    if "/" not in base:
        return base
    repository, _, commit = base.partition("@")
    for name in variants.names(root):
        settings = variants.load(name, root).settings
        source, revision = settings.get("SOURCE"), settings.get("REVISION")
        is_own_copy = source and source.value == repository and source.file.parent.name == name
        if is_own_copy and (not commit or (revision and revision.value == commit)):
            return name
    raise RecipeError(
        f"no variant is a copy of {base}; add one with `slimqwen variant new --name NAME --checkpoint {base}`"
    )


def _load_yaml(file: Path) -> tuple[Any, yaml.Node | None]:
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise RecipeError(
            f"{file}: cannot be read ({error.strerror}); write a recipe into that file"
        ) from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"{file}: not UTF-8 ({error.reason}); save it as UTF-8") from None
    try:
        # Safe, because the loader is a subclass of SafeLoader.
        return yaml.load(text, _UniqueKeysLoader), yaml.compose(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise RecipeError(
            f"{file}:{line}: not usable YAML: {error.problem or error.context}; correct that line"
        ) from None
    except (yaml.YAMLError, ValueError) as error:
        raise RecipeError(f"{file}: not usable YAML: {' '.join(str(error).split())}; correct it") from None


def stage_fault(name: str, previous: str, stages: Mapping[str, Stage] = STAGES) -> str | None:
    """Why a stage must not come right after `previous` (empty for the first stage); None if it may."""
    if name not in stages:
        return f"no stage {name!r}; {_nearest(name, stages)}"
    follows = stages[name].follows
    if previous in stages and stages[previous].last:
        return f"no stage may follow {previous}; put {previous} last"
    if previous and follows and previous not in follows:
        return f"{name} reads a file that {' or '.join(follows)} writes; put {name} right after that stage"
    return None


def _without_faults(
    schema: type[BaseModel], values: Mapping[str, Any], error: ValidationError, folder: Path
) -> BaseModel | None:
    """Parameters without the faulty ones, so that the others can be inspected; None if they make no valid model."""
    faulty = {problem["loc"][0] for problem in error.errors() if problem["loc"]}
    examples = {
        name: field.examples[0]
        for name, field in schema.model_fields.items()
        if field.is_required() and field.examples
    }
    try:
        rest = examples | {key: value for key, value in values.items() if key not in faulty}
        return schema.model_validate(rest, context={"folder": folder})
    except ValidationError:
        return None


@dataclass(frozen=True)
class _RecipeText:
    """Text of a recipe.yaml, in which the line of a path in its content can be found."""

    file: Path
    root: yaml.Node | None

    def place(self, path: YamlPath) -> str:
        """file:line of the innermost part of `path` that exists in the text."""
        return f"{self.file}:{self._find(path)[0] + 1}"

    def places(self, path: YamlPath) -> dict[str, str]:
        """file:line of the stage at `path`, under `""`, and of its parameters by their dotted names."""
        places = {"": self.place(path)}
        pending = [("", self._find(path)[1])]
        while pending:
            prefix, node = pending.pop()
            for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
                places[prefix + key.value] = f"{self.file}:{key.start_mark.line + 1}"
                pending.append((f"{prefix}{key.value}.", value))
        return places

    def faults_of(self, error: ValidationError, path: YamlPath, schema: type[BaseModel]) -> Iterable[str]:
        """One line for each problem that pydantic lists, with its location."""
        # A misspelt key is often the reason for a missing one, which is then not reported.
        problems = error.errors()
        unknown = {problem["loc"][:-1] for problem in problems if problem["type"] == "extra_forbidden"}
        for problem in problems:
            inner = problem["loc"]
            dotted = ".".join(map(str, inner)) or "the recipe"
            if problem["type"] == "extra_forbidden":
                fault = f"unknown key {inner[-1]!r}; {_nearest(str(inner[-1]), _fields(schema, inner[:-1]))}"
            elif problem["type"] == "missing":
                if inner[:-1] in unknown:
                    continue
                fault = f"{dotted} is missing; add it"
            elif problem["input"] is None:
                fault = f"{dotted} is not filled in; write a value"
            else:
                fault = (
                    f"{dotted}: {problem['msg'].removeprefix('Value error, ')}, here is {problem['input']!r}"
                )
            yield f"{self.place((*path, *inner))}: {fault}"

    def _find(self, path: YamlPath) -> tuple[int, yaml.Node | None]:
        """Line, counted from 0, and value of the innermost part of `path` that exists."""
        node = self.root
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
        return line, node


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
