"""The difference of two checkpoints, tensor by tensor.

The parts of a quantised weight (`weight_packed`, `weight_scale`, ...) are compared as one tensor. Both checkpoints are
read in blocks of rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt

from slimqwen.checkpoint.files import kept_token_ids
from slimqwen.checkpoint.tensors import selected_rows
from slimqwen.checkpoint.weights import Weight, read_weights
from slimqwen.progress import Progress, silent

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


class TensorChange(StrEnum):
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
        change: SELECTED: the rows that vocab_map.json of the second checkpoint lists, byte for byte; ROUNDED: quantised
            in the second checkpoint alone.
        deviation: root mean square of the difference relative to that of the first tensor, quantised weights
            dequantised; None where the shapes differ or one is missing.
    """

    name: str
    change: TensorChange
    deviation: float | None = None

    @property
    def kind(self) -> str:
        """Part of the model that the tensor belongs to."""
        return next((kind for part, kind in _KINDS.items() if part in self.name), "other")


def compare_checkpoints(
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
    # A text-only checkpoint of a multimodal one has shorter names.
    before, after = (
        {
            name.replace("model.language_model.", "model."): weight
            for name, weight in read_weights(folder).items()
        }
        for folder in (first, second)
    )
    token_ids = kept_token_ids(second)
    differences = []
    names = [name for name in dict.fromkeys([*before, *after]) if not leave_out(name)]
    for done, name in enumerate(names):
        differences.append(_difference(name, before.get(name), after.get(name), token_ids))
        progress("comparing tensors", done + 1, len(names))
    return differences


def _difference(
    name: str, before: Weight | None, after: Weight | None, token_ids: npt.NDArray[np.int64] | None
) -> TensorDifference:
    if before is None:
        return TensorDifference(name, TensorChange.ADDED)
    if after is None:
        return TensorDifference(name, TensorChange.MISSING)
    if after.has_bytes_of(before):
        return TensorDifference(name, TensorChange.NONE, 0.0)
    if before.shape != after.shape:
        selected = token_ids is not None and _has_selected_rows(before, after, token_ids)
        return TensorDifference(name, TensorChange.SELECTED if selected else TensorChange.REPLACED)
    rounded = after.is_quantised and not before.is_quantised
    return TensorDifference(
        name, TensorChange.ROUNDED if rounded else TensorChange.REPLACED, _deviation(before, after)
    )


def _has_selected_rows(before: Weight, after: Weight, token_ids: npt.NDArray[np.int64]) -> bool:
    """Whether a table of one row a token id holds exactly the rows that were kept."""
    if before.is_quantised or after.is_quantised or token_ids[-1] >= before.shape[0]:
        return False
    kept, stored = selected_rows(before.carrier, token_ids), after.carrier
    if (kept.dtype, kept.shape) != (stored.dtype, stored.shape):
        return False
    position = 0
    for rows in map(bytes, kept.chunks()):
        if rows != b"".join(stored.chunks(position, position + len(rows))):
            return False
        position += len(rows)
    return True


def _deviation(before: Weight, after: Weight) -> float | None:
    difference = total = 0.0
    for first, second in zip(before.blocks(), after.blocks(), strict=True):
        difference += float((second - first).double().square().sum())
        total += float(first.double().square().sum())
    return float((difference / total) ** 0.5) if total else None
