"""The output head of a checkpoint: where it lies, and its singular values."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slimqwen import checkpoint
from slimqwen.checkpoint.tensors import TensorInfo, output_head, torch_dtype
from slimqwen.errors import SlimqwenError
from slimqwen.progress import Progress, silent

if TYPE_CHECKING:
    from torch import Tensor

BLOCK_NUMBERS = 2**22
"""Numbers of the head in memory at once."""

_DTYPES = ("BF16", "F16", "F32")


class HeadError(SlimqwenError):
    """An output head or a text that cannot be analysed."""


@dataclass(frozen=True)
class Head:
    """Location of a checkpoint's output head."""

    name: str
    tied: bool
    info: TensorInfo

    @property
    def rows(self) -> int:
        """Rows of the vocabulary, padding included."""
        return self.info.shape[0]

    @property
    def hidden(self) -> int:
        """Length of a row."""
        return self.info.shape[1]

    def blocks(self, rows: int | None = None) -> "Iterator[tuple[int, Tensor]]":
        """Yield (first row, float32 [at most `rows`, hidden]) from the first row to the last."""
        import torch

        row_bytes = (self.info.end - self.info.start) // self.rows
        step = rows or max(1, BLOCK_NUMBERS // self.hidden)
        dtype = torch_dtype(self.info.dtype)
        for first in range(0, self.rows, step):
            last = min(first + step, self.rows)
            content = bytearray().join(self.info.chunks(first * row_bytes, last * row_bytes))
            yield first, torch.frombuffer(content, dtype=dtype).float().view(-1, self.hidden)


@dataclass(frozen=True)
class Spectrum:
    """Singular values and right singular vectors of a head.

    Attributes:
        singular_values: float64 [hidden], largest first. Those below 1e-7 of the largest are noise: their squares
            vanish in the rounding of the Gram matrix.
        vectors: float64 [hidden, hidden], one column per value.
    """

    singular_values: "Tensor"
    vectors: "Tensor"

    def energy(self, rank: int) -> float:
        """Share of the sum of squared singular values in the first `rank`."""
        squares = self.singular_values.square()
        return float(squares[:rank].sum() / squares.sum())

    def rank(self, energy: float) -> int:
        """The smallest rank with at least that share."""
        import torch

        shares = self.singular_values.square().cumsum(0)
        return int(torch.searchsorted(shares, energy * shares[-1])) + 1

    def relative_error(self, rank: int) -> float:
        """||W - W_rank|| / ||W||, Frobenius norms, of the best head of that rank."""
        squares = self.singular_values.square()
        return math.sqrt(float(squares[rank:].sum() / squares.sum()))


def find(folder: Path) -> Head:
    """The output head of a checkpoint: lm_head.weight, else the embedding.

    Raises:
        HeadError: the head is not in 16 or 32 bits, or lm_head is missing although the config does not tie embeddings.
        CorruptCheckpointError: as `list_tensors`.
    """
    config = checkpoint.read_config(folder)
    name, info = output_head(folder)
    tied = name != "lm_head.weight"
    if tied and not config.get(
        "tie_word_embeddings", checkpoint.text_config(config).get("tie_word_embeddings")
    ):
        raise HeadError(
            f"{folder} has no lm_head.weight, yet its config ties no embeddings; use a 16-bit checkpoint"
        )
    if info.dtype not in _DTYPES:
        raise HeadError(f"{folder}: {name} is not in 16 or 32 bits; use a 16-bit language model")
    return Head(name, tied, info)


def spectrum(head: Head, progress: Progress = silent) -> Spectrum:
    """Singular values from the Gram matrix, summed over blocks of rows in float64.

    Raises:
        HeadError: a value is NaN or infinite, or all are zero.
    """
    import torch

    gram = torch.zeros(head.hidden, head.hidden, dtype=torch.float64)
    for first, block in head.blocks():
        progress("sum the Gram matrix", first, head.rows)
        gram += block.double().T @ block.double()
    if not gram.isfinite().all() or not gram.any():
        raise HeadError(f"{head.info.file}: {head.name} is zero or not finite; make that checkpoint again")
    squares, vectors = torch.linalg.eigh(gram)
    return Spectrum(squares.flip(0).clamp_min(0).sqrt(), vectors.flip(1))
