"""Deliberate damage to a checkpoint: what the gates have to catch, or they are worth nothing.

Each kind damages one copy, the same way for the same seed, and leaves everything else byte for byte as it was.
"""

import random
import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from slimqwen import checkpoint
from slimqwen.checkpoint import NewTensor, TensorInfo
from slimqwen.errors import SlimqwenError

SCALE_SIGMA = 0.3
"""Standard deviation of the logarithm of what each scale is multiplied by."""

SWAPPED_SHARE = 0.05
"""Share of the embedding's rows that change places."""


class DamageError(SlimqwenError):
    """A checkpoint has nothing of the kind that is to be damaged."""


class Damage(StrEnum):
    """What is done to a checkpoint."""

    SCALES = "scales of a layer"
    ROWS = "rows of the embedding"
    HEAD = "fc of the MTP head"


def damage(source: Path, destination: Path, kind: Damage, seed: int) -> str:
    """Copy a checkpoint with one damage.

    Args:
        source: the checkpoint; for SCALES a quantised one.
        destination: an empty folder.
        kind: SCALES multiplies each scale of the quantised linears of one layer, drawn at random, by exp(N(0,
            SCALE_SIGMA)); ROWS has SWAPPED_SHARE of the embedding's rows change places in one cycle; HEAD shuffles the
            columns of `mtp.fc`.
        seed: decides what and how.

    Returns:
        what was damaged: the layer, or the tensor.

    Raises:
        DamageError: the checkpoint has no such tensor.
    """
    stored = checkpoint.tensors(source)
    pattern, change = _KINDS[kind]
    places = sorted({found[1] for name in stored if (found := pattern.fullmatch(name))})
    if not places:
        raise DamageError(f"{source} has no tensor {pattern.pattern}; take a checkpoint that has")
    place = random.Random(seed).choice(places)
    chance = torch.Generator().manual_seed(seed)
    contents = {}
    for name, info in stored.items():
        found = pattern.fullmatch(name)
        if found and found[1] == place:
            with safe_open(info.file, framework="pt") as opened:
                damaged = change(opened.get_tensor(name), chance).contiguous()
            contents[name] = damaged.view(torch.uint8).numpy().tobytes()

    shards = {info.file.name for info in stored.values()}

    def exchange(name: str, info: TensorInfo) -> Mapping[str, NewTensor] | None:
        return (
            {name: NewTensor(info.dtype, info.shape, lambda: [contents[name]])} if name in contents else None
        )

    checkpoint.carry_all(source, destination, leave_out=[*checkpoint.COMPILE_CACHE, *shards])
    checkpoint.rewrite(source, destination, exchange)
    return place


def _scales(scale: Tensor, chance: torch.Generator) -> Tensor:
    factors = torch.exp(SCALE_SIGMA * torch.randn(scale.shape, generator=chance))
    return (scale.float() * factors).to(scale.dtype)


def _rows(table: Tensor, chance: torch.Generator) -> Tensor:
    rows = torch.randperm(len(table), generator=chance)[: max(2, round(SWAPPED_SHARE * len(table)))]
    swapped = table.clone()
    swapped[rows] = table[rows.roll(1)]
    return swapped


def _columns(weight: Tensor, chance: torch.Generator) -> Tensor:
    return weight[:, torch.randperm(weight.shape[1], generator=chance)]


_KINDS: Mapping[Damage, tuple[re.Pattern[str], Callable[[Tensor, torch.Generator], Tensor]]] = {
    Damage.SCALES: (re.compile(r"(.*\.layers\.\d+)\..*\.weight_scale"), _scales),
    Damage.ROWS: (re.compile(r"(.*embed_tokens\.weight)"), _rows),
    Damage.HEAD: (re.compile(r"(mtp\.fc\.weight)"), _columns),
}
