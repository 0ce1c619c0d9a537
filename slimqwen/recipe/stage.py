"""The interface of a recipe stage: a pure function from one checkpoint folder to another."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, Self, TypeVar

from pydantic import BaseModel, ConfigDict

from slimqwen.errors import SlimqwenError
from slimqwen.models.outline import Outline, SampledTexts
from slimqwen.models.shape import Packing

Facts = dict[str, str | int | float | bool | list[int] | list[float]]
"""Results that a stage reports; the manifest of its output keeps them."""


TORCH_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_WAIT_POLICY": "passive",
    "SLIMQWEN_UNPACK": "0",
}
"""Environment of a stage that computes with torch: no network; no tokenizer threads, which conflict with a data
loader's; OpenMP threads that do not spin while they wait, which is six times slower on a shared machine; and packed
products only in vLLM, because unpacking by free memory would change a stage's output (`patches.cpu.unpacked_prompts`).
"""


class StageError(SlimqwenError):
    """A stage cannot process its input, or its result must not be published."""


class Parameters(BaseModel):
    """Base class of every stage's parameters: unknown keys are errors, values are frozen, defaults are validated.

    A field that is excluded from serialisation (a path) does not enter the content key; `Stage.data` must digest the
    file instead.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


ENGINE_BYTES: Final = 3 * 2**30
"""Resident memory of vLLM with KV cache and activations, without weights, bytes; measured: 2.1 GiB for a small one."""


@dataclass(frozen=True)
class Needs:
    """Computed needs of a stage.

    Attributes:
        disk_bytes: upper bound of the size of the stage's output.
        memory_bytes: upper bound of the main memory of the stage's process.
        operations: approximate number of floating-point operations, from which the time follows.
        fixed_seconds: approximate time that does not depend on the model's size: imports, starts of an engine.
        read_bytes: approximate number of bytes of weights that an engine reads, which bound the time of sampling.
    """

    disk_bytes: int
    memory_bytes: int
    operations: float = 0
    fixed_seconds: float = 10
    read_bytes: float = 0

    @classmethod
    def of_engine(cls, outline: Outline, tokens: int, token_bytes: int, steps: float) -> Self:
        """Needs of a stage in which vLLM writes texts beside a copy of the checkpoint.

        Args:
            tokens: tokens that the engine reads and writes.
            token_bytes: upper bound of the disk space of a token.
            steps: decode steps, each of which reads the weights once.
        """
        size = outline.disk_bytes
        operations = 2 * tokens * outline.num_weights
        memory = ENGINE_BYTES + size
        return cls(size + token_bytes * tokens, memory, operations, fixed_seconds=45, read_bytes=steps * size)


@dataclass(frozen=True)
class Fault:
    """Why a stage cannot process its input with its parameters.

    Attributes:
        text: cause and cure as one line.
        field: dotted name of the parameter to change; empty if the stage itself does not fit its input.
        is_fetched: whether the text names a command that fetches what is missing, so that only a run needs it.
    """

    text: str
    field: str = ""
    is_fetched: bool = False


class Dimensions(Protocol):
    """Interface of `Shape` and `Outline`: the dimensions of a checkpoint, which the `reshape` of a stage changes."""

    @property
    def text(self) -> Mapping[str, Any]:
        """The language model's part of the config."""

    def with_vocabulary(self, rows: int) -> Self:
        """The dimensions with `rows` rows in embedding and output head."""

    def with_draft_vocabulary(self, rows: int) -> Self:
        """The dimensions with a draft head of `rows` rows."""

    def with_mtp_head(self) -> Self:
        """The dimensions with an MTP head in 16 bits."""

    def with_packing(self, kinds: Mapping[str, Packing]) -> Self:
        """The dimensions with the given kinds of linears packed."""

    def with_outputs(self, outputs: SampledTexts) -> Self:
        """The dimensions with outputs of their own model beside the checkpoint."""


D = TypeVar("D", bound=Dimensions)


class Reshape(Protocol):
    """Function that computes the dimensions of a stage's output from those of its input."""

    def __call__(self, shape: D, parameters: Any, /) -> D:
        """Return the dimensions of the output."""


def unchanged_shape(shape: D, parameters: Any, /) -> D:
    """The reshape of a stage that changes no dimension."""
    return shape


@dataclass(frozen=True)
class Stage:
    """One kind of stage. Its functions must be importable by name: a stage runs in a process of its own.

    Attributes:
        name: key under `stages:` in a recipe.yaml.
        parameters: model of the value under that key.
        run: (source, destination, parameters, progress) -> facts. Reads the checkpoint source and writes a complete
            checkpoint into the empty folder destination; the same inputs give the same bytes. Its output goes to the
            stage's log.
        resumes: whether `run` has a keyword argument `unfinished`, a folder that outlives a killed run, to resume
            from; the result is the same as that of an uninterrupted run.
        needs: (outline of the input, parameters) -> estimate.
        inspect: (outline of the input, parameters) -> every fault that headers, settings and the beginnings of texts
            show. All stages of a recipe are inspected before it runs, and each again when it begins (`require_fit`).
        changes: parameters -> regular expressions of the names of tensors that the stage may change, drop or add.
        reshape: (shape, parameters) -> dimensions of the output, for the stages after it, plans and rooflines.
        follows: stages that write a file which this stage reads; one of them has to come right before it.
        data: parameters -> digest of every outside input by name.
        own_tokens: parameters -> number of tokens that the stage reads of the text that the model itself wrote.
        environment: variables of the stage's process.
        last: whether no stage may follow, because a change of the checkpoint would invalidate the result.
        summarise: facts -> one sentence about what the stage decided; None if it decides nothing.
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
    own_tokens: Callable[[Any], int] = lambda parameters: 0
    environment: Mapping[str, str] = field(default_factory=dict)
    resumes: bool = False
    last: bool = False
    summarise: Callable[[Facts], str | None] = lambda facts: None

    def only_caches(self, parameters: Any) -> bool:
        """Whether the stage adds only a cache: no stage may follow it, and it changes no tensor."""
        return self.last and not self.changes(parameters)


def require_fit(faults: Iterable[Fault]) -> None:
    """Raise the first fault, if there is one.

    Raises:
        StageError: there is a fault.
    """
    for fault in faults:
        raise StageError(fault.text)
