"""NVFP4: E2M1 numbers of 4 bits, two in a byte, with an E4M3 scale for sixteen and one float32 scale for the weight."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slimqwen.formats.format import FLOATING, Layout, Parts, Stored

if TYPE_CHECKING:
    from torch import Tensor

GROUP = 16
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Numbers of the bits 000 to 111; a fourth, the highest, is the sign (OCP Microscaling Formats 1.0)."""


@dataclass(frozen=True)
class Nvfp4(Layout):
    """NVFP4 as ModelOpt stores it: weight [rows, columns / 2], weight_scale [rows, columns / 16], weight_scale_2."""

    carrier = "weight"
    dtypes = ("U8",)
    word_bits, bits = 8, 4
    required = ("weight_scale", "weight_scale_2")
    optional = ("input_scale",)
    by_row = ("weight", "weight_scale")
    by_weight = ("weight_scale_2", "input_scale")

    def has_cpu_kernel(self, module: str) -> bool:
        """False: _POSSIBLE_NVFP4_KERNELS of vllm/model_executor/kernels/linear names CUDA (from 7.5) and ROCm alone."""
        return False

    def parts(self, rows: int, columns: int) -> Parts:
        """The stored tensors: bytes with two weights each, scales of groups, and the scale of the weight."""
        scale, whole = self.required
        return {
            self.carrier: ((rows, columns // 2), ("U8",)),
            scale: ((rows, columns // GROUP), ("F8_E4M3",)),
            whole: ((1,), FLOATING[::-1]),
            self.optional[0]: ((1,), FLOATING[::-1]),
        }

    def shape(self, parts: Stored) -> tuple[int, ...]:
        """[rows, columns]; two columns share a stored byte."""
        rows, columns = parts[self.carrier].shape
        return rows, 2 * columns

    def scale(self, scales: "Tensor", whole: "Tensor") -> "Tensor":
        """Combine the scales of groups with the scale of the weight, in float32: their product."""
        return scales * whole

    def read(self, parts: Stored, first: int, last: int) -> "Tensor":
        """Rows as numbers: stored numbers x both scales; the lower half of a byte is the first of its two weights."""
        import torch

        numbers = torch.tensor([*_E2M1, *(-number for number in _E2M1)])
        scale, whole = self.required
        words = parts[self.carrier].rows(first, last).read()
        scales = parts[scale].rows(first, last).read().float()
        scales = self.scale(scales, parts[whole].unchanged().read().float())
        halves = torch.stack([words & 15, words >> 4], 2).long()
        return (numbers[halves].reshape(*scales.shape, GROUP) * scales[:, :, None]).flatten(1)


@dataclass(frozen=True)
class CompressedNvfp4(Nvfp4):
    """NVFP4 as compressed-tensors stores it: weight_packed, weight_scale, and weight_global_scale, which divides."""

    carrier = "weight_packed"
    required = ("weight_scale", "weight_global_scale")
    optional = ("input_global_scale",)
    by_row = ("weight_packed", "weight_scale")
    by_weight = ("weight_global_scale", "input_global_scale")

    def scale(self, scales: "Tensor", whole: "Tensor") -> "Tensor":
        """Combine the scales of groups with the scale of the weight, by which they are divided."""
        return scales / whole
