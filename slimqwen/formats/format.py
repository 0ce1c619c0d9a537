"""What a quantisation format is: the two classes that each module beside this one implements.

A layout is one way to store one weight; a format is what a quantization_config says of all weights of a checkpoint.
Both know names, dtypes, shapes and numbers, and no files: `slimqwen.checkpoint.weights` reads those.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from slimqwen.errors import SlimqwenError

if TYPE_CHECKING:
    from torch import Tensor

Precision = Literal["bf16", "fp8", "int8"]
"""Arithmetic of a GPU."""

Parts = dict[str, tuple[tuple[int, ...], tuple[str, ...]]]
"""Parts of a weight: end of a tensor's name -> its shape and the dtypes it may have, the usual one first."""

FLOATING = ("BF16", "F16", "F32")
"""Dtypes that scales may have; engines convert between them as they load."""


class UnsupportedFormatError(SlimqwenError):
    """A valid checkpoint whose format does not support the requested operation."""


class _Numbers(Protocol):
    def read(self) -> Any: ...


class StoredTensor(Protocol):
    """A tensor of a checkpoint, as `slimqwen.checkpoint.tensors.TensorInfo` is one; dtype as safetensors spells it."""

    @property
    def dtype(self) -> str: ...  # noqa: D102

    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102

    def rows(self, first: int, last: int) -> _Numbers: ...  # noqa: D102

    def unchanged(self) -> _Numbers: ...  # noqa: D102


Stored = Mapping[str, StoredTensor]
"""Parts of a stored weight: end of the name -> tensor."""


class Layout(ABC):
    """How a weight of [rows, columns] is stored, in one or more tensors; base class of all layouts.

    Attributes:
        carrier: the part (tensor) that holds the numbers.
        dtypes: dtypes of the carrier.
        word_bits: bits of an element of the carrier.
        required: parts without which the numbers cannot be read.
        optional: parts that a weight may have although its config does not promise them.
        further: parts that only some configs promise.
        by_row: parts whose first dimension is the rows, so that rows can be selected.
        by_weight: parts that belong to all rows together; they stay where rows are selected.
        bits: bits of a weight.
        precision: arithmetic of its products on a GPU that has it; on others vLLM widens the weights to 16 bits.
    """

    carrier: ClassVar[str]
    dtypes: ClassVar[tuple[str, ...]]
    word_bits: ClassVar[int]
    required: ClassVar[tuple[str, ...]] = ()
    optional: ClassVar[tuple[str, ...]] = ()
    further: ClassVar[tuple[str, ...]] = ()
    by_row: ClassVar[tuple[str, ...]] = ()
    by_weight: ClassVar[tuple[str, ...]] = ()
    bits: int
    precision: Precision = "bf16"

    def has_cpu_kernel(self, module: str) -> bool:
        """Whether vLLM's CPU build, with this package's plugin, computes with a module's weight in this layout."""
        return True

    def is_stored(self, parts: Stored) -> bool:
        """Whether the tensors (parts) of a weight are stored in this layout."""
        return self.carrier in parts and parts[self.carrier].dtype in self.dtypes

    def count(self, elements: int) -> int:
        """Number of weights that so many elements of the carrier hold: eight of 4 bits in an int32."""
        return elements * self.word_bits // self.bits

    @abstractmethod
    def parts(self, rows: int, columns: int) -> Parts:
        """Tensors (parts) that store a weight of [rows, columns]: end of the name -> shape and allowed dtypes."""

    @abstractmethod
    def shape(self, parts: Stored) -> tuple[int, ...]:
        """[rows, columns] of a stored weight."""

    def unreadable(self, parts: Stored) -> str | None:
        """Why the weight cannot be read here, as the end of a sentence "the weight is …"; None if it can."""
        return None

    @abstractmethod
    def read(self, parts: Stored, first: int, last: int) -> "Tensor":
        """Rows from `first` to before `last` as an engine computes with them, float32 [rows, columns].

        Args:
            parts: tensors of the weight, by the end of their names.
            first: a multiple of 32.
            last: a multiple of 32, or the number of rows.
        """

    def blocks(self, parts: Stored, rows: int) -> Iterator["Tensor"]:
        """Yield the whole weight in float32 [at most `rows`, columns], from its first row on.

        Args:
            parts: tensors of the weight, by the end of their names.
            rows: a multiple of 32.
        """
        count = self.shape(parts)[0]
        for first in range(0, count, rows):
            yield self.read(parts, first, min(first + rows, count))


class Format:
    """What a quantization_config says: which weights are quantised, in which layout, and what can be done with them.

    The base class stands for an unknown quant_method: any tensors are accepted, and 16-bit ones are read.

    Attributes:
        methods: values of quant_method, in lower case.
        layouts: every layout that the format has.
        takes_more: whether further linears can be quantised; vLLM reads only one format a checkpoint.
        is_exact: whether config.json says of each linear how it is stored; in other formats the tensors say it.
        needs_cache_scheme: whether vLLM reads scales of an 8-bit KV cache only where `kv_cache_scheme` announces them.
        settings: quantization_config.
    """

    methods: ClassVar[tuple[str, ...]] = ()
    layouts: ClassVar[tuple[type[Layout], ...]] = ()
    takes_more: ClassVar[bool] = False
    is_exact: ClassVar[bool] = False
    needs_cache_scheme: ClassVar[bool] = False

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings
        self.method = str(settings.get("quant_method", ""))

    @property
    def is_known(self) -> bool:
        """Whether this package knows the format."""
        return type(self) is not Format

    def describe(self) -> str:
        """The format in a few words, with the bits of its weights where it has several widths."""
        bits = self.settings.get("bits")
        return f"{self.method or 'unknown'}{f', {bits}-bit' if bits else ''}"

    def packs(self, module: str) -> bool:
        """Whether a module (linear, embedding or output head) is quantised by this config."""
        if module == "lm_head":
            return bool(self.settings.get("lm_head"))
        left = self.settings.get("modules_to_not_convert") or self.settings.get("ignored_layers") or ()
        return not module.endswith("embed_tokens") and not is_named(module, left)

    def layouts_of(self, module: str) -> Sequence[Layout]:
        """The layouts in which a module's quantised weight may be stored; the config states the first of them."""
        return ()

    def refused(self) -> str | None:
        """Why vLLM does not load this checkpoint, and what to use instead; None if it does.

        The text continues a sentence whose subject is the checkpoint, such as "is quantised in …".
        """
        return None

    def refused_addition(self) -> str | None:
        """Why no further linears can be packed, and what to do; None if they can.

        The text continues a sentence whose subject is the checkpoint, such as "is quantised in …".
        """
        if self.takes_more:
            return None
        return (
            f"is quantised in the format {self.method}, to which no packed linears can be added; take the 16-bit "
            "checkpoint or one in compressed-tensors as the base, or leave this stage out"
        )

    def needs_gpu(self, module: str) -> bool:
        """Whether vLLM's CPU build cannot compute with the quantised weight of a module."""
        return not all(layout.has_cpu_kernel(module) for layout in self.layouts_of(module)[:1])


class Unquantised(Format):
    """No quantization_config: every weight in 16 or 32 bits."""

    methods = ("",)
    takes_more = True
    needs_cache_scheme = True

    def packs(self, module: str) -> bool:
        """False: nothing is quantised."""
        return False


ORDERED = (
    "is quantised in activation order (desc_act=true or actorder=group), which vLLM no longer loads; use a checkpoint "
    "with desc_act=false or actorder=static"
)
"""What is refused of formats that may store columns in the order of their activations."""


def is_named(module: str, entries: Sequence[str]) -> bool:
    """Whether an entry of a list of 16-bit modules names a module, by consecutive parts of its dotted name.

    The entry "mlp.gate" names model.layers.0.mlp.gate, but not model.layers.0.mlp.gate_proj.
    """
    return any(f".{entry.strip('.')}." in f".{module}." for entry in entries)
