"""What a recipe stage is: a pure function from one checkpoint folder to another, and what decides its result."""

import hashlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

Facts = dict[str, str | int | float | bool]
"""What a stage found out on its way, kept in the manifest of its output."""


class Parameters(BaseModel):
    """Base of every stage's parameters: unknown keys are errors, values never change, defaults are checked.

    A field excluded from serialisation (a path) does not enter the content key: `Stage.data` must digest what it
    points to.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


@dataclass(frozen=True)
class Needs:
    """What a stage will use at most, by estimate.

    Attributes:
        disk_bytes: size of its output.
        memory_bytes: of main memory, all included.
    """

    disk_bytes: int
    memory_bytes: int


@dataclass(frozen=True)
class Stage:
    """One kind of stage. Functions must be importable by name: a stage runs in a process of its own.

    Attributes:
        name: the key under `stages:` in a recipe.yaml.
        parameters: their schema.
        run: (source, destination, parameters, progress) -> facts. Reads the checkpoint source, writes a whole
            checkpoint into the empty folder destination; the same inputs give the same bytes. What it prints
            goes to the stage's log.
        resumes: whether `run` takes a further argument `unfinished`, a folder that outlives a run that was killed, to
            go on from; the result is the same as of a run in one go.
        needs: (source, parameters) -> estimate; may raise a SlimqwenError for what cannot work, before it starts.
        data: parameters -> digest of every outside input by name.
        code: modules whose source decides the result, besides the one that defines `run`.
        packages: distributions whose versions decide the result.
        environment: variables of the stage's process, there before any of its libraries is imported.
        last: whether no stage may follow, because any change to the checkpoint would spoil the result.
    """

    name: str
    parameters: type[Parameters]
    run: Callable[..., Facts]
    needs: Callable[[Path, Any], Needs]
    data: Callable[[Any], Mapping[str, str]] = lambda parameters: {}
    code: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    resumes: bool = False
    last: bool = False


def source_digest(module: str) -> str:
    """SHA-256 of a module's source file, found without running the module."""
    found = importlib.util.find_spec(module)
    assert found is not None
    assert found.origin is not None
    return hashlib.sha256(Path(found.origin).read_bytes()).hexdigest()
