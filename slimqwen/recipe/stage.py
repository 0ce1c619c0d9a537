"""The contract of a recipe stage: a pure function from one checkpoint folder to another, and its content key."""

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from pydantic import BaseModel, ConfigDict

from slimqwen.checkpoint.files import sha256
from slimqwen.errors import SlimqwenError
from slimqwen.models.outline import Outline
from slimqwen.models.shape import Packing

Facts = dict[str, str | int | float | bool | list[int] | list[float]]
"""Results that a stage reports; they are kept in the manifest of its output."""


TORCH_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_WAIT_POLICY": "passive",
}
"""Environment of a stage that computes with torch: no network is needed; the tokenizer's threads conflict with a data
loader's; OpenMP threads that spin while they wait are six times slower on a shared machine."""


class StageError(SlimqwenError):
    """A stage cannot work on its input, or its result must not be published."""


class Parameters(BaseModel):
    """Base of every stage's parameters: unknown keys are errors, values are frozen, defaults are validated.

    A field that is excluded from serialisation (a path) does not enter the content key: `Stage.data` must digest
    what it points to.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


@dataclass(frozen=True)
class Needs:
    """What a stage takes, by arithmetic.

    Attributes:
        disk_bytes: upper bound of the size of its output.
        memory_bytes: upper bound of the main memory of its process.
        operations: floating-point operations, about; they decide its time.
        fixed_seconds: time that does not depend on the size of the model, about: imports, starts of an engine.
    """

    disk_bytes: int
    memory_bytes: int
    operations: float = 0
    fixed_seconds: float = 10


@dataclass(frozen=True)
class Fault:
    """What a stage cannot work with, and the cure.

    Attributes:
        text: one line.
        field: dotted name of the parameter to change; empty where the stage itself does not fit its input.
    """

    text: str
    field: str = ""


class Dimensions(Protocol):
    """What a stage changes of a checkpoint's dimensions: a `Shape` or an `Outline`."""

    @property
    def text(self) -> Mapping[str, Any]:
        """The language model's part of the config."""

    def with_vocabulary(self, rows: int) -> Self:
        """Another number of rows in embedding and output head."""

    def with_draft_vocabulary(self, rows: int) -> Self:
        """A draft head of so many rows."""

    def with_packing(self, kinds: Mapping[str, Packing]) -> Self:
        """Kinds of linears packed."""


D = TypeVar("D", bound=Dimensions)


class Reshape(Protocol):
    """The dimensions of a stage's output, from those of its input."""

    def __call__(self, shape: D, parameters: Any, /) -> D:
        """Return the changed dimensions."""


def unchanged_shape(shape: D, parameters: Any, /) -> D:
    """The reshape of a stage that changes no dimension."""
    return shape


@dataclass(frozen=True)
class Stage:
    """One kind of stage. Its functions must be importable by name: a stage runs in a process of its own.

    Attributes:
        name: key under `stages:` in a recipe.yaml.
        parameters: model of what stands under that key.
        run: (source, destination, parameters, progress) -> facts. Reads the checkpoint source and writes a complete
            checkpoint into the empty folder destination; the same inputs give the same bytes. Its prints go to the
            stage's log.
        resumes: whether `run` takes a keyword argument `unfinished`, a folder that outlives a killed run, to resume
            from; the result is the same as that of an uninterrupted run.
        needs: (input, parameters) -> estimate.
        inspect: (input, parameters) -> every fault that headers, settings and the beginnings of texts show. A recipe is
            inspected whole before it runs, and a stage begins with its own (`require_fit`).
        changes: parameters -> regular expressions of the names of tensors that it may change, drop or add.
        reshape: (shape, parameters) -> dimensions of its output, for the stages after it, plans and rooflines.
        follows: stages that leave a file beside the checkpoint that it reads; one of them has to come right before it.
        data: parameters -> digest of every outside input by name.
        code: modules whose source decides the result, besides the module that defines `run`.
        packages: distributions whose versions decide the result.
        environment: variables of the process that it runs in.
        last: whether no stage may follow, because a change of the checkpoint would invalidate the result.
        summarise: facts -> what the stage decided, one sentence; None where it decides nothing.
    """

    name: str
    parameters: type[BaseModel]
    run: Callable[..., Facts]
    needs: Callable[[Outline, Any], Needs]
    inspect: Callable[[Outline, Any], Iterable[Fault]] = lambda outline, parameters: ()
    changes: Callable[[Any], tuple[str, ...]] = lambda parameters: ()
    reshape: Reshape = unchanged_shape
    follows: tuple[str, ...] = ()
    data: Callable[[Any], Mapping[str, str]] = lambda parameters: {}
    code: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    resumes: bool = False
    last: bool = False
    summarise: Callable[[Facts], str | None] = lambda facts: None

    def only_caches(self, parameters: Any) -> bool:
        """Whether its output answers as its input does: no stage may follow it, and it changes no tensor."""
        return self.last and not self.changes(parameters)


def require_fit(faults: Iterable[Fault]) -> None:
    """Go on only without a fault.

    Raises:
        StageError: the first fault.
    """
    for fault in faults:
        raise StageError(fault.text)


def source_digest(module: str) -> str:
    """SHA-256 of a module's source file; the module is not executed."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return sha256(Path(spec.origin))
