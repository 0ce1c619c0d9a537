"""The difference of two checkpoints, tensor by tensor.

The parts of a weight that compressed-tensors packs (`weight_packed`, `weight_scale`, ...) are compared as one tensor.
Both checkpoints are read in blocks of rows, so that memory does not grow with the tensors.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from slimqwen.checkpoint import packing
from slimqwen.checkpoint.files import kept_token_ids
from slimqwen.checkpoint.tensors import TensorInfo, list_tensors, selected_rows
from slimqwen.progress import Progress, silent

if TYPE_CHECKING:
    from torch import Tensor

_PACKED_PART = re.compile(r"(.*\.weight)_(packed|scale|shape|zero_point)")
_BLOCK_ROWS = 4096
"""A multiple of the zero points in a word, which are packed along the rows."""

_KINDS = {
    "mtp.": "draft head",
    "embed_tokens": "embedding",
    "lm_head": "output head",
    ".visual.": "vision",
    "norm": "norm",
    ".mlp.": "MLP",
    ".self_attn.": "attention",
    ".linear_attn.": "linear attention",
}


class Change(StrEnum):
    """What became of a tensor."""

    NONE = "same bytes"
    ROUNDED = "rounded"
    SELECTED = "rows selected"
    REPLACED = "replaced"
    MISSING = "missing"
    ADDED = "added"


@dataclass(frozen=True)
class TensorDifference:
    """A tensor of two checkpoints.

    Attributes:
        name: of the unpacked tensor.
        change: SELECTED: the rows that vocab_map.json of the second checkpoint lists, byte for byte; ROUNDED: packed
            into integers in the second checkpoint alone.
        deviation: root mean square of the difference relative to that of the first tensor, packed weights dequantised;
            None where the shapes differ or one is missing.
    """

    name: str
    change: Change
    deviation: float | None = None

    @property
    def kind(self) -> str:
        """Part of the model that the tensor belongs to."""
        return next((kind for part, kind in _KINDS.items() if part in self.name), "other")


def compare(
    first: Path,
    second: Path,
    progress: Progress = silent,
    leave_out: Callable[[str], bool] = lambda name: False,
) -> list[TensorDifference]:
    """Compare two checkpoints.

    Args:
        progress: receives (activity, done, total) in tensors.
        leave_out: whether a tensor of this name is neither read nor returned.

    Returns:
        A difference for each other tensor of either, in the order of the first checkpoint, additions last.

    Raises:
        CorruptCheckpointError: a checkpoint or the vocab_map.json of the second cannot be read.
    """
    before, after = _weights(first), _weights(second)
    token_ids = kept_token_ids(second)
    differences = []
    names = [name for name in dict.fromkeys([*before, *after]) if not leave_out(name)]
    for done, name in enumerate(names):
        differences.append(_difference(name, before.get(name), after.get(name), token_ids))
        progress("comparing tensors", done + 1, len(names))
    return differences


@dataclass(frozen=True)
class _Weight:
    """A tensor as stored: itself under the part "", or the packed parts by name."""

    parts: Mapping[str, TensorInfo]

    @property
    def is_packed(self) -> bool:
        return "packed" in self.parts

    @cached_property
    def shape(self) -> tuple[int, ...]:
        if self.is_packed:
            rows, columns = np.frombuffer(b"".join(self.parts["shape"].chunks()), "<i8").tolist()
            return rows, columns
        return self.parts[""].shape

    def has_bytes_of(self, other: "_Weight") -> bool:
        """Whether every part is stored with the same dtype, shape and bytes."""
        return self.parts.keys() == other.parts.keys() and all(
            (info.dtype, info.shape) == (other.parts[part].dtype, other.parts[part].shape)
            and all(a == b for a, b in zip(info.chunks(), other.parts[part].chunks(), strict=True))
            for part, info in self.parts.items()
        )

    def blocks(self) -> Iterator["Tensor"]:
        """The dequantised weight: float32 [at most 4096, columns] at a time."""
        count = self.shape[0] if self.shape else 1
        for first in range(0, count, _BLOCK_ROWS):
            last = min(first + _BLOCK_ROWS, count)
            if self.is_packed:
                yield self._unpacked(first, last)
            else:
                yield self.parts[""].rows(first, last).read().float()

    def _unpacked(self, first: int, last: int) -> "Tensor":
        words, scales = (self.parts[part].rows(first, last).read() for part in ("packed", "scale"))
        columns, zero_points = self.shape[1], None
        if "zero_point" in self.parts:
            per_word = 32 // (32 * words.shape[1] // columns)
            zero_points = self.parts["zero_point"].rows(first // per_word, -(-last // per_word)).read()
        return packing.dequantised(words, scales, columns, zero_points)


def _weights(folder: Path) -> dict[str, _Weight]:
    parts: dict[str, dict[str, TensorInfo]] = defaultdict(dict)
    stored = list_tensors(folder)
    for name, info in stored.items():
        match = _PACKED_PART.fullmatch(name)
        if match and f"{match[1]}_packed" in stored:
            parts[match[1]][match[2]] = info
        else:
            parts[name][""] = info
    return {name: _Weight(part) for name, part in parts.items()}


def _difference(
    name: str, before: _Weight | None, after: _Weight | None, token_ids: npt.NDArray[np.int64] | None
) -> TensorDifference:
    if before is None:
        return TensorDifference(name, Change.ADDED)
    if after is None:
        return TensorDifference(name, Change.MISSING)
    if after.has_bytes_of(before):
        return TensorDifference(name, Change.NONE, 0.0)
    if before.shape != after.shape:
        selected = token_ids is not None and _has_selected_rows(before, after, token_ids)
        return TensorDifference(name, Change.SELECTED if selected else Change.REPLACED)
    rounded = after.is_packed and not before.is_packed
    return TensorDifference(name, Change.ROUNDED if rounded else Change.REPLACED, _deviation(before, after))


def _has_selected_rows(before: _Weight, after: _Weight, token_ids: npt.NDArray[np.int64]) -> bool:
    """Whether a table of one row a token id holds exactly the rows that were kept."""
    if before.is_packed or after.is_packed or token_ids[-1] >= before.shape[0]:
        return False
    kept, stored = selected_rows(before.parts[""], token_ids), after.parts[""]
    if (kept.dtype, kept.shape) != (stored.dtype, stored.shape):
        return False
    position = 0
    for rows in map(bytes, kept.chunks()):
        if rows != b"".join(stored.chunks(position, position + len(rows))):
            return False
        position += len(rows)
    return True


def _deviation(before: _Weight, after: _Weight) -> float | None:
    difference = total = 0.0
    try:
        for first, second in zip(before.blocks(), after.blocks(), strict=True):
            difference += float((second - first).double().square().sum())
            total += float(first.double().square().sum())
    except KeyError:
        # torch_dtype does not know a dtype such as F8_E4M3: its scales are tensors of their own.
        return None
    return float((difference / total) ** 0.5) if total else None
