"""The layouts of GPTQ and AWQ, transposed and in words of 32 bits, and the formats that have them.

| layout | tensors of a weight of [rows, columns] |
|---|---|
| GPTQ | qweight [words, rows], qzeros [groups, words], scales [groups, rows], g_idx [columns] |
| AWQ | qweight [columns, words], qzeros [groups, words], scales [groups, rows]; words interleaved |
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from slimqwen.formats.format import ORDERED, Format, Layout, Parts, Stored

if TYPE_CHECKING:
    from torch import Tensor

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position in a word of each of eight outputs, in the order of AutoAWQ's kernels."""


@dataclass(frozen=True)
class GptqWords(Layout):
    """GPTQ's layout: a word of 32 bits holds weights of neighbouring columns.

    Its first version stores zero points minus 1.

    Attributes:
        bits: bits per weight.
        group_size: columns that share a scale; -1 for all.
        zero_offset: what is to be added to a stored zero point.
    """

    bits: int
    group_size: int
    zero_offset: int = 1

    carrier = "qweight"
    dtypes = ("I32",)
    word_bits = 32
    required = ("qzeros", "scales")
    read_bits: ClassVar[tuple[int, ...]] = (2, 4, 8)
    optional: ClassVar[tuple[str, ...]] = ("g_idx",)

    def parts(self, rows: int, columns: int) -> Parts:
        """The stored tensors: words, zero points and scales."""
        groups = -(-columns // self.group_size) if self.group_size > 0 else 1
        return {
            "qweight": (self._words(rows, columns), ("I32",)),
            "qzeros": ((groups, rows * self.bits // 32), ("I32",)),
            "scales": ((groups, rows), ("F16", "BF16", "F32")),
            **dict.fromkeys(self.optional, ((columns,), ("I32",))),
        }

    def _words(self, rows: int, columns: int) -> tuple[int, int]:
        return columns * self.bits // 32, rows

    def shape(self, parts: Stored) -> tuple[int, ...]:
        """[rows, columns], from the shapes of words and zero points."""
        return parts["scales"].shape[1], parts["qweight"].shape[0] * 32 // self._stored_bits(parts)

    def _stored_bits(self, parts: Stored) -> int:
        return 32 * parts["qzeros"].shape[1] // parts["scales"].shape[1]

    def unreadable(self, parts: Stored) -> str | None:
        """Why the weight cannot be read: its bits do not divide a word of 32 bits; else None."""
        bits = self._stored_bits(parts)
        return None if bits in self.read_bits else f"packed in {bits} bits"

    def read(self, parts: Stored, first: int, last: int) -> "Tensor":
        """Rows as numbers: (levels - zero points) x scales."""
        import torch

        levels, points = self._unpack(parts, self._stored_bits(parts))
        scales, columns = parts["scales"].unchanged().read().float(), self.shape(parts)[1]
        groups = torch.arange(columns) // (columns // len(scales))
        if "g_idx" in parts:
            groups = parts["g_idx"].unchanged().read().long()
        return ((levels - points[groups]) * scales[groups]).T.contiguous()[first:last]

    def blocks(self, parts: Stored, rows: int) -> Iterator["Tensor"]:
        """Yield the weight in blocks of rows; all of it is read at once, because it is stored transposed."""
        yield from self.read(parts, 0, self.shape(parts)[0]).split(rows)

    def _unpack(self, parts: Stored, bits: int) -> tuple["Tensor", "Tensor"]:
        """Levels [columns, rows] and zero points [groups, rows]."""
        words, zeros = (parts[part].unchanged().read() for part in ("qweight", "qzeros"))
        return _unpacked(words.T.contiguous(), bits).T, _unpacked(zeros, bits) + self.zero_offset


@dataclass(frozen=True)
class AwqWords(GptqWords):
    """AWQ's layout (AutoAWQ's `gemm`): a word holds eight 4-bit weights of neighbouring rows, interleaved."""

    zero_offset: int = 0

    optional = ()
    read_bits = (4,)

    def _words(self, rows: int, columns: int) -> tuple[int, int]:
        return columns, rows * self.bits // 32

    def shape(self, parts: Stored) -> tuple[int, ...]:
        """[rows, columns], from the shapes of scales and words."""
        return parts["scales"].shape[1], parts["qweight"].shape[0]

    def _unpack(self, parts: Stored, bits: int) -> tuple["Tensor", "Tensor"]:
        levels, points = (
            _unpacked(parts[part].unchanged().read(), bits).unflatten(1, (-1, 8))[..., _AWQ_ORDER].flatten(1)
            for part in ("qweight", "qzeros")
        )
        return levels, points


def _unpacked(words: "Tensor", bits: int) -> "Tensor":
    """Unpack words, int32 [rows, words], to unsigned numbers, int64 [rows, numbers]; the lowest bits come first."""
    import torch

    return ((words.long()[..., None] >> torch.arange(0, 32, bits)) & (2**bits - 1)).flatten(1)


class Gptq(Format):
    """quant_method gptq (AutoGPTQ, GPTQModel). `dynamic` leaves linears in 16 bits or gives them other bits."""

    methods = ("gptq", "auto_gptq", "gptq_v2")
    layouts = (GptqWords,)

    def packs(self, module: str) -> bool:
        """Whether a module is quantised: all linears but those that `dynamic` excludes; lm_head if its key is set."""
        return super().packs(module) and self._override(module) is not None

    def _override(self, module: str) -> Mapping[str, Any] | None:
        """The settings of a module that differ; None for a module in 16 bits."""
        for pattern, changes in (self.settings.get("dynamic") or {}).items():
            # vLLM matches from the beginning of the name (gptq_utils.py, get_dynamic_override).
            if re.match(pattern[2:] if pattern[:2] in ("-:", "+:") else pattern, module):
                return None if pattern.startswith("-:") else changes
        return {}

    def layouts_of(self, module: str) -> list[GptqWords]:
        """GPTQ's layout with the bits and group size of this module."""
        settings = {**self.settings, **(self._override(module) or {})}
        is_second = "gptq_v2" in (self.method, settings.get("checkpoint_format"))
        return [GptqWords(settings["bits"], settings.get("group_size", -1), 0 if is_second else 1)]

    def refused(self) -> str | None:
        """Why vLLM refuses the checkpoint: columns in the order of activations, and not one scale a row; else None."""
        is_ordered = self.settings.get("desc_act") is True and self.settings.get("group_size") != -1
        return ORDERED if is_ordered else None


class AutoRound(Format):
    """quant_method auto-round, in GPTQ's layout or AWQ's; `extra_config` has linears of other bits."""

    methods = ("auto-round", "auto_round", "inc")
    layouts = (GptqWords, AwqWords)

    def packs(self, module: str) -> bool:
        """Whether a module is quantised: all linears not in 16 bits by `extra_config`; lm_head if its key is set."""
        return super().packs(module) and self._override(module).get("bits", 0) < 16

    def _override(self, module: str) -> Mapping[str, Any]:
        changes: Mapping[str, Any] = (self.settings.get("extra_config") or {}).get(module, {})
        return changes

    def layouts_of(self, module: str) -> list[GptqWords]:
        """GPTQ's or AWQ's layout, whichever the config names, with the bits and group size of this module."""
        settings = {**self.settings, **self._override(module)}
        is_awq = "auto_awq" in str(settings.get("packing_format"))
        return [(AwqWords if is_awq else GptqWords)(settings["bits"], settings["group_size"])]


_FIRST_NAMES = (("bits", "w_bit"), ("group_size", "q_group_size"))


class Awq(Format):
    """quant_method awq (AutoAWQ)."""

    methods = ("awq", "auto_awq")
    layouts = (AwqWords,)

    def layouts_of(self, module: str) -> list[AwqWords]:
        """AWQ's layout, always in 4 bits."""
        # AutoAWQ's first configs have other names.
        bits, size = (self.settings.get(key, self.settings.get(old)) for key, old in _FIRST_NAMES)
        return [AwqWords(bits or 4, size or -1)]
