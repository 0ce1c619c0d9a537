"""The contract of a recipe stage: a pure function from one checkpoint folder to another, and its content key."""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from slimqwen.checkpoint.files import sha256
from slimqwen.errors import SlimqwenError
from slimqwen.models.shape import Shape

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
    """Estimated upper bounds of the size of a stage's output and of the main memory of its process."""

    disk_bytes: int
    memory_bytes: int


@dataclass(frozen=True)
class Stage:
    """One kind of stage. Its functions must be importable by name: a stage runs in a process of its own.

    Attributes:
        name: key under `stages:` in a recipe.yaml.
        run: (source, destination, parameters, progress) -> facts. Reads the checkpoint source and writes a complete
            checkpoint into the empty folder destination; the same inputs give the same bytes. Its prints go to the
            stage's log.
        resumes: whether `run` takes a keyword argument `unfinished`, a folder that outlives a killed run, to resume
            from; the result is the same as that of an uninterrupted run.
        needs: (source, parameters) -> estimate; raises a SlimqwenError for an input that the stage cannot work on.
        changes: parameters -> regular expressions of the names of tensors that it may change, drop or add.
        reshape: (shape, parameters) -> dimensions of its output, for plans and rooflines; unchanged if left out.
            Raises a SlimqwenError for dimensions that the stage cannot work on.
        follows: stages that leave a file beside the checkpoint that it reads; one of them has to come right before it.
        data: parameters -> digest of every outside input by name.
        code: modules whose source decides the result, besides the module that defines `run`.
        packages: distributions whose versions decide the result.
        last: whether no stage may follow, because a change of the checkpoint would invalidate the result.
    """

    name: str
    parameters: type[BaseModel]
    run: Callable[..., Facts]
    needs: Callable[[Path, Any], Needs]
    changes: Callable[[Any], tuple[str, ...]] = lambda parameters: ()
    reshape: Callable[[Shape, Any], Shape] = lambda shape, parameters: shape
    follows: tuple[str, ...] = ()
    data: Callable[[Any], Mapping[str, str]] = lambda parameters: {}
    code: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    resumes: bool = False
    last: bool = False

    def only_caches(self, parameters: Any) -> bool:
        """Whether its output answers as its input does: no stage may follow it, and it changes no tensor."""
        return self.last and not self.changes(parameters)


def source_digest(module: str) -> str:
    """SHA-256 of a module's source file; the module is not executed."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return sha256(Path(spec.origin))
