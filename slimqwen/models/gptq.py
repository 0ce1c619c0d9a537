"""GPTQ (Frantar et al., arXiv 2210.17323) on rows of one weight: later columns compensate the error of earlier ones.

The algorithm is llmcompressor's. It gets the rows of a weight in blocks, with the scales of round-to-nearest.
"""

import torch
from torch import Tensor

from slimqwen.errors import SlimqwenError


class GptqError(SlimqwenError):
    """GPTQ cannot be computed with the calibration inputs of a weight."""


class GptqRounding:
    """Rounds the rows of a weight, block by block, so that its products with calibration inputs change little.

    A call with a block of rows and their scales returns the rounded integers.

    Args:
        second_moments: float32 [inputs, inputs], the sum of x x^T over the calibration inputs x of the weight.
        group_size: number of neighbouring weights of a row that share a scale.
        bits: bits per weight.
    """

    def __init__(self, second_moments: Tensor, group_size: int, bits: int) -> None:
        from compressed_tensors.quantization import QuantizationArgs

        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._moments = second_moments.to(device)
        self._form = QuantizationArgs(
            num_bits=bits, symmetric=True, strategy="group", group_size=group_size, actorder="static"
        )
        self._group_size = group_size
        self._squares = torch.zeros(3, dtype=torch.float64)

    def __call__(self, rows: Tensor, scales: Tensor) -> Tensor:
        """Round a block of rows to integers, int8 [rows, inputs].

        Args:
            rows: float32 [rows, inputs].
            scales: bfloat16 [rows, groups].

        Raises:
            GptqError: the inputs are too few or too alike.
        """
        from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight

        exact = rows.to(self._moments.device)
        steps = scales.float().to(exact.device)
        steps = torch.where(steps > 0, steps, 1)  # groups of zeros have the scale 0
        points = torch.zeros_like(steps, dtype=torch.int8)
        rounded, _, has_failed = quantize_weight(
            exact[None].clone(),  # the function overwrites its first two arguments
            self._moments[None].clone(),
            steps[None],
            points[None],
            None,
            self._form,
        )
        if bool(has_failed.any()):
            raise GptqError("the calibration text gives too few different inputs for GPTQ; use more text")
        spread = steps.repeat_interleave(self._group_size, 1)
        levels = 2 ** (self._form.num_bits - 1)
        nearest = (exact / spread).round().clamp(-levels, levels - 1) * spread
        self._squares += torch.stack(
            [self._square(part) for part in (exact, exact - nearest, exact - rounded[0])]
        )
        return (rounded[0] / spread).round().to(torch.int8).cpu()

    def _square(self, rows: Tensor) -> Tensor:
        """The sum of the squared products of `rows` with all calibration inputs."""
        return ((rows @ self._moments) * rows).sum(dtype=torch.float64).cpu()

    @property
    def errors(self) -> tuple[float, float]:
        """Relative errors of the rows' products with the inputs, over all rows so far: GPTQ, round-to-nearest."""
        exact, nearest, rounded = self._squares.tolist()
        return (rounded / exact) ** 0.5, (nearest / exact) ** 0.5
