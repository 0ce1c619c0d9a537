"""Tensors in memory in the place of a checkpoint's."""

from dataclasses import dataclass

import torch


@dataclass
class Stored:
    """A tensor in the place of one in a file."""

    tensor: torch.Tensor
    dtype: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions."""
        return tuple(self.tensor.shape)

    def rows(self, first: int, last: int) -> "Stored":
        """Some rows."""
        return Stored(self.tensor[first:last], self.dtype)

    def unchanged(self) -> "Stored":
        """The whole."""
        return self

    def read(self) -> torch.Tensor:
        """The numbers."""
        return self.tensor
