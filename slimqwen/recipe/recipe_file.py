"""recipe.yaml: a description, the base checkpoint, and the stages that transform it.

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
    """A recipe.yaml that cannot be used, or a recipe that cannot be run."""

    @classmethod
    def of_faults(cls, faults: Sequence[str]) -> "RecipeError":
        """An error of one line for one fault, else with a line for each."""
        if len(faults) == 1:
            return cls(faults[0])
        return RecipeFaultsError(
            "\n  ".join([f"{len(faults)} faults in the recipe, nothing has run:", *faults])
        )


class RecipeFaultsError(RecipeError):
    """All faults of a recipe, each in a line with its place: the one expected error of more than one line."""


@dataclass(frozen=True)
class Step:
    """One entry under `stages:`.

    Attributes:
        places: file:line of the parameters that the recipe names, by their dotted names; `""` is the stage's own.
        is_whole: whether the parameters are those of the recipe, not what is left of them without faulty ones.
    """

    stage: Stage
    parameters: BaseModel
    places: Mapping[str, str] = field(default_factory=dict, repr=False)
    is_whole: bool = True

    def located(self, fault: Fault) -> str:
        """A fault of the step in one line, with file and line of the parameter, or of what it is a part of."""
        name = fault.field
        while name and name not in self.places:
            name = name.rpartition(".")[0]
        place = self.places.get(name)
        return f"{place}: {self.stage.name}: {fault.text}" if place else fault.text


@dataclass(frozen=True)
class Recipe:
    """A recipe.yaml of at least one step.

    Attributes:
        base: a variant, or owner/name or owner/name@commit of a hub repository.
        faults: what is wrong in the file, a line each with its place; stages that cannot be understood are left out.
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
        RecipeError: as `parse_recipe`; or the faults that it finds.
    """
    recipe = parse_recipe(file, stages)
    if recipe.faults:
        raise RecipeError.of_faults(recipe.faults)
    return recipe


def parse_recipe(file: Path, stages: Mapping[str, Stage] = STAGES) -> Recipe:
    """Read a recipe.yaml and find every unknown or missing key and invalid value, with the nearest known names.

    Raises:
        RecipeError: the file cannot be read, is not YAML, or has not the three keys of a recipe.
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
    """The variant that a recipe's base means: itself, or the copy of that hub repository, at the commit that it names.

    Raises:
        RecipeError: no variant is a copy of that repository at that commit.
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
        f"no variant is a copy of {base}; `slimqwen variant new --name NAME --checkpoint {base}` adds one"
    )


def _load_yaml(file: Path) -> tuple[Any, yaml.Node | None]:
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"{file}: cannot be read ({error.strerror}); write a recipe there") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"{file}: not UTF-8 ({error.reason}); convert it") from None
    try:
        # A subclass of the safe loader.
        return yaml.load(text, _UniqueKeysLoader), yaml.compose(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise RecipeError(
            f"{file}:{line}: not usable YAML: {error.problem or error.context}; correct that line"
        ) from None
    except (yaml.YAMLError, ValueError) as error:
        raise RecipeError(f"{file}: not usable YAML: {' '.join(str(error).split())}; correct it") from None


def stage_fault(name: str, previous: str, stages: Mapping[str, Stage] = STAGES) -> str | None:
    """What forbids a stage right after the previous one, which is empty for the first; None where nothing does."""
    if name not in stages:
        return f"no stage {name!r}; {_nearest(name, stages)}"
    follows = stages[name].follows
    if previous in stages and stages[previous].last:
        return f"no stage may follow {previous}; put that one last"
    if previous and follows and previous not in follows:
        return f"{name} reads what {' or '.join(follows)} leaves beside the checkpoint; put it right after"
    return None


def _without_faults(
    schema: type[BaseModel], values: Mapping[str, Any], error: ValidationError, folder: Path
) -> BaseModel | None:
    """The parameters without the faulty ones, so that the others can be inspected; None where that is not enough."""
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
    """The lines of a recipe.yaml, by path in its content."""

    file: Path
    root: yaml.Node | None

    def place(self, path: YamlPath) -> str:
        """file:line of the innermost part of a path that exists in the text."""
        return f"{self.file}:{self._find(path)[0] + 1}"

    def places(self, path: YamlPath) -> dict[str, str]:
        """file:line of a stage and of its parameters, by their dotted names."""
        places = {"": self.place(path)}
        pending = [("", self._find(path)[1])]
        while pending:
            prefix, node = pending.pop()
            for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
                places[prefix + key.value] = f"{self.file}:{key.start_mark.line + 1}"
                pending.append((f"{prefix}{key.value}.", value))
        return places

    def faults_of(self, error: ValidationError, path: YamlPath, schema: type[BaseModel]) -> Iterable[str]:
        """One line for each of the problems that pydantic lists."""
        # A misspelt key is often the reason for a missing one, which then goes without saying.
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
        """Line, from 0, and value of the innermost part of a path that exists."""
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
