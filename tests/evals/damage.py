"""Deliberate damage to a checkpoint that the gate has to catch.

Each kind damages one copy, the same way for the same seed; every other byte stays as it was.
"""

import random
import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from slimqwen.checkpoint.files import COMPILE_CACHE, carry_all
from slimqwen.checkpoint.tensors import NewTensor, TensorInfo, list_tensors, rewrite
from slimqwen.evals import EvalError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SCALE_SIGMA = 0.3
"""Standard deviation of the logarithm of the factor of each scale."""

SWAPPED_SHARE = 0.05
"""Share of the embedding's rows that change places."""


class Damage(StrEnum):
    """A kind of damage."""

    SCALES = "scales of a layer"
    ROWS = "rows of the embedding"
    HEAD = "fc of the MTP head"


def damage(source: Path, destination: Path, kind: Damage, seed: int) -> str:
    """Copy a checkpoint with one damage.

    Args:
        source: checkpoint; a quantised one for SCALES.
        kind: SCALES multiplies each scale of the quantised linears of one random layer by exp(N(0, SCALE_SIGMA)), the
            MTP head's left out, because they decide no answer; ROWS moves SWAPPED_SHARE of the embedding's rows in one
            cycle; HEAD shuffles the columns of `mtp.fc`, packed ones where it is quantised.

    Returns:
        The damaged layer or tensor.

    Raises:
        EvalError: the checkpoint has no such tensor.
    """
    import torch
    from safetensors import safe_open

    stored = list_tensors(source)
    pattern, change = _KINDS[kind]
    targets = sorted({match[1] for name in stored if (match := pattern.fullmatch(name))})
    if not targets:
        raise EvalError(f"{source} has no tensor {pattern.pattern}; take a checkpoint that has one")
    target = random.Random(seed).choice(targets)
    rng = torch.Generator().manual_seed(seed)

    def replacement(name: str, info: TensorInfo) -> Mapping[str, NewTensor] | None:
        match = pattern.fullmatch(name)
        if match is None or match[1] != target:
            return None
        with safe_open(info.file, framework="pt") as shard:
            damaged = change(shard.get_tensor(name), rng).contiguous()
        return {
            name: NewTensor(info.dtype, info.shape, lambda: [damaged.view(torch.uint8).numpy().tobytes()])
        }

    shards = {info.file.name for info in stored.values()}
    carry_all(source, destination, leave_out=[*COMPILE_CACHE, *shards])
    rewrite(source, destination, replacement)
    return target


def _perturb_scales(scale: "Tensor", rng: "torch.Generator") -> "Tensor":
    import torch

    factors = torch.exp(SCALE_SIGMA * torch.randn(scale.shape, generator=rng))
    return (scale.float() * factors).to(scale.dtype)


def _move_rows(table: "Tensor", rng: "torch.Generator") -> "Tensor":
    import torch

    rows = torch.randperm(len(table), generator=rng)[: max(2, round(SWAPPED_SHARE * len(table)))]
    moved = table.clone()
    moved[rows] = table[rows.roll(1)]
    return moved


def _shuffle_columns(weight: "Tensor", rng: "torch.Generator") -> "Tensor":
    import torch

    return weight[:, torch.randperm(weight.shape[1], generator=rng)]


_KINDS: Mapping[Damage, tuple[re.Pattern[str], Callable[["Tensor", "torch.Generator"], "Tensor"]]] = {
    Damage.SCALES: (re.compile(r"((?!mtp\.).*\.layers\.\d+)\..*\.weight_scale"), _perturb_scales),
    Damage.ROWS: (re.compile(r"(.*embed_tokens\.weight)"), _move_rows),
    Damage.HEAD: (re.compile(r"(mtp\.fc\.weight)(?:_packed)?"), _shuffle_columns),
}
