"""Reads recipe.yaml: a description, the base checkpoint, and the stages that transform it, as in this example.

`corpus` names the text of every stage that names none; without it the model writes its own (`self`).

description: AWQ 4-bit MLP weights.
base: tiny
corpus: general
stages:
  - calibrate:
      group_size: 32
  - prune_vocab:
      size: 50%
  - quantise_lm_head
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from slimqwen import variant as variants
from slimqwen.errors import SlimqwenError, suggest_name
from slimqwen.recipe.registry import STAGES
from slimqwen.recipe.stage import Fault, Stage
from slimqwen.text.corpus import SELF
from slimqwen.yaml_file import YamlPath, read_yaml

WRITE_TEXT = "write_text"
"""The stage that comes first where another one reads the model's own text."""


class RecipeError(SlimqwenError):
    """A recipe.yaml cannot be used, or a recipe cannot be run."""


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
        """Describe a fault of the step in one line, with file and line of the parameter or of its nearest parent."""
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
        steps: the stages with their parameters; stages that cannot be read are left out.
        faults: faults of the file, a line each with its location.
        base_place: file and line of the base.
    """

    file: Path
    description: str
    base: str
    steps: tuple[Step, ...]
    faults: tuple[str, ...] = ()
    base_place: str = ""


_Entry = Annotated[
    dict[str, dict[str, Any] | None],
    BeforeValidator(lambda entry: {entry: None} if isinstance(entry, str) else entry),  # `- calibrate`
]


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    description: Annotated[str, Field(min_length=1)]
    corpus: Annotated[str, Field(min_length=1)] = str(SELF)
    base: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*(/[\w.-]+(@[0-9a-f]{40})?)?$")]
    stages: Annotated[list[_Entry], Field(min_length=1)]


def read_recipe(file: Path, stages: Mapping[str, Stage] = STAGES) -> Recipe:
    """Read and validate a recipe.yaml, in which paths are relative to its folder.

    Raises:
        RecipeError: the file cannot be read, is not YAML, lacks one of a recipe's three keys, or has faults such as
            unknown keys; the message has a line for each.
    """
    recipe = parse_recipe(file, stages)
    if recipe.faults:
        raise RecipeError(*recipe.faults)
    return recipe


def parse_recipe(file: Path, stages: Mapping[str, Stage] = STAGES) -> Recipe:
    """Read a recipe.yaml; faults such as unknown keys and invalid values are collected in `Recipe.faults`.

    Raises:
        RecipeError: the file cannot be read, is not YAML, or lacks one of a recipe's three keys.
    """
    text = read_yaml(file, error=RecipeError, missing="is missing; write a recipe into that file")
    document = text.validate(_Document, text.content)
    context = {
        "folder": file.parent,
        "corpus": document.corpus,
        "base": _name_base(document.base, file.parent.parent.parent),
    }
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
            parameters = schema.model_validate(values or {}, context=context)
            steps.append(Step(stages[name], parameters, text.places(path)))
        except ValidationError as error:
            faults += text.list_faults(error, path, schema)
            if (rest := _without_faults(schema, values or {}, error, context)) is not None:
                steps.append(Step(stages[name], rest, text.places(path), is_whole=False))
    steps = [*_first_writes_text(steps, stages, text.place(("stages",))), *steps]
    place = text.place(("base",))
    return Recipe(file, document.description, document.base, tuple(steps), tuple(faults), place)


def _name_base(base: str, root: Path) -> str:
    """Name of the variant that a base denotes; the base itself if there is none, which `find_base_variant` says."""
    try:
        return find_base_variant(base, root)
    except SlimqwenError:
        return base


def _first_writes_text(steps: Sequence[Step], stages: Mapping[str, Stage], place: str) -> list[Step]:
    """The step by which the model writes the text that others read; none if they read none or the recipe has it."""
    tokens = max((step.stage.own_tokens(step.parameters) for step in steps), default=0)
    if not tokens or any(step.stage.name == WRITE_TEXT for step in steps):
        return []
    stage = stages[WRITE_TEXT]
    return [Step(stage, stage.parameters.model_validate({"tokens": tokens}), {"": place})]


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
        f"no variant has the checkpoint {base}; add one with `slimqwen variant new --name NAME --checkpoint {base}`"
    )


def stage_fault(name: str, previous: str, stages: Mapping[str, Stage] = STAGES) -> str | None:
    """Why a stage must not come right after `previous` (empty for the first stage); None if it may."""
    if name not in stages:
        return f"no stage {name!r}; {suggest_name(name, stages)}"
    follows = stages[name].follows
    if previous in stages and stages[previous].last:
        return f"no stage may follow {previous}; put {previous} last"
    if previous and follows and previous not in follows:
        return f"{name} reads a file that {' or '.join(follows)} writes; put {name} right after that stage"
    return None


def _without_faults(
    schema: type[BaseModel], values: Mapping[str, Any], error: ValidationError, context: Mapping[str, Any]
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
        return schema.model_validate(rest, context=dict(context))
    except ValidationError:
        return None
