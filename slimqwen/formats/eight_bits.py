"""Weights of eight bits, each a number of its tensor times a scale: FP8 and INT8 of every format."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slimqwen.formats.format import FLOATING, Layout, Parts, Precision, Stored, StoredTensor

if TYPE_CHECKING:
    from torch import Tensor

FP8, INT8 = ("F8_E4M3", "F8_E5M2"), ("I8",)


@dataclass(frozen=True)
class EightBits(Layout):
    """weight [rows, columns] and its scales: one for the weight, or one for each row, group or block.

    Attributes:
        precision: of the numbers; vLLM rounds the inputs to it too.
        block: rows and columns of the weights that share a scale; None for a side is the whole side.
        scale: the part with the scales.
    """

    precision: Precision = "fp8"
    block: tuple[int | None, int | None] = (None, None)
    scale: str = "weight_scale"

    carrier = "weight"
    dtypes = (*FP8, *INT8)
    word_bits = bits = 8
    optional = ("input_scale", "input_zero_point", "activation_scale")
    further = ("weight_scale", "weight_scale_inv")
    by_row = ("weight", "weight_scale")
    by_weight = optional

    def parts(self, rows: int, columns: int) -> Parts:
        """The stored tensors: the weight and its scales."""
        height, width = self.block[0] or rows, self.block[1] or columns
        scales = (1,) if self.block == (None, None) else (-(-rows // height), -(-columns // width))
        numbers = FP8 if self.precision == "fp8" else INT8
        return {"weight": ((rows, columns), numbers), self.scale: (scales, FLOATING)}

    def shape(self, parts: Stored) -> tuple[int, ...]:
        """[rows, columns] of the stored numbers."""
        return parts["weight"].shape

    def unreadable(self, parts: Stored) -> str | None:
        """Why the weight cannot be read: its number of scales does not fit the blocks; else None."""
        scale = _block_scales(parts)
        if scale is None:
            return None
        sides = zip(self.shape(parts), self._shared(parts, scale), strict=True)
        fits = scale.shape == tuple(-(-size // side) for size, side in sides)
        return None if fits else f"scaled by {list(scale.shape)} numbers"

    def _shared(self, parts: Stored, scale: StoredTensor) -> tuple[int, int]:
        """Rows and columns that share a scale; where the config has no blocks, the number of scales says it."""
        (rows, columns), (height, width) = self.shape(parts), self.block
        return height or -(-rows // scale.shape[0]), width or -(-columns // scale.shape[1])

    def read(self, parts: Stored, first: int, last: int) -> "Tensor":
        """Rows as numbers: stored numbers x scales."""
        numbers: Tensor = parts["weight"].rows(first, last).read().float()
        if scale := _block_scales(parts):
            height, width = self._shared(parts, scale)
            part = scale.rows(first // height, -(-last // height)).read().float()
            spread = part.repeat_interleave(height, 0)[first % height :][: last - first]
            return numbers * spread.repeat_interleave(width, 1)[:, : numbers.shape[1]]
        scale = _scales(parts)
        return numbers * scale.unchanged().read().float() if scale else numbers


def _scales(parts: Stored) -> StoredTensor | None:
    return parts.get("weight_scale") or parts.get("weight_scale_inv")


def _block_scales(parts: Stored) -> StoredTensor | None:
    """The scales if there is more than one."""
    scale = _scales(parts)
    return None if scale is None or len(scale.shape) < 2 or scale.shape == (1, 1) else scale
