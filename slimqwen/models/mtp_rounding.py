"""GPTQ for the MTP head: roundings from the inputs that its linears get while it drafts.

From the second step of a draft on, the head reads its own state instead of the target's, and it reaches a step only if
the tokens before were accepted. So inputs are collected over all steps of drafts on the target's own outputs: those of
the first step at every position, as a server computes it, those of later steps where the draft was right up to there,
weighted by the number of drafts per position.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from slimqwen.models.gptq import GptqRounding
from slimqwen.models.hidden_states import store_hidden_states
from slimqwen.models.mtp_head import PREFIX, DraftingModel, DraftUnroller, load_drafting_model
from slimqwen.models.shape import Packing
from slimqwen.progress import Progress

_STEPS = 2
"""The first step of drafts, and all later ones, whose inputs are summed apart."""


class _Inputs:
    """Sums of x x^T over the inputs x of every linear of a head.

    Attributes:
        step: 0 in the first step of a draft, 1 in later ones.
        rows: bool [positions], which of them count in this step.
    """

    def __init__(self, head: nn.Module) -> None:
        self.step, self.rows = 0, torch.empty(0)
        self.sums: list[dict[str, Tensor]] = [{} for _ in range(_STEPS)]
        self._linears = {name: each for name, each in head.named_modules() if isinstance(each, nn.Linear)}

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Collect the inputs of the head's passes in a `with` block."""

        def keep(name: str, inputs: Tensor) -> None:
            counted = inputs.reshape(-1, inputs.shape[-1])[self.rows].float()
            sums = self.sums[self.step]
            if name not in sums:
                sums[name] = counted.new_zeros(counted.shape[1], counted.shape[1])
            sums[name].addmm_(counted.T, counted)

        hooks = [
            linear.register_forward_pre_hook(lambda _, inputs, name=name: keep(name, inputs[0]))
            for name, linear in self._linears.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def round_head(
    source: Path,
    texts: Sequence[Sequence[int]],
    depth: int,
    packed: Packing,
    folder: Path,
    progress: Progress,
) -> dict[str, GptqRounding]:
    """Prepare GPTQ for the linears of a checkpoint's MTP head; returns a `GptqRounding` for each, by weight name.

    Args:
        texts: token ids of outputs of the checkpoint, each with its prompt.
        depth: tokens drafted at a time (K).
        packed: bits and groups to round the head to.
        folder: an empty folder, for the texts' hidden states.
    """
    moments = measure_moments(source, texts, depth, folder, progress)
    return {
        f"{PREFIX}{name}.weight": GptqRounding(sums, packed.group_size or len(sums), packed.bits)
        for name, sums in moments.items()
    }


def measure_moments(
    source: Path, texts: Sequence[Sequence[int]], depth: int, folder: Path, progress: Progress
) -> Mapping[str, Tensor]:
    """Sum x x^T over the inputs x that each linear of the MTP head gets while it drafts on texts.

    Args:
        source: checkpoint with an MTP head.
        texts: token ids of outputs of the checkpoint, each with its prompt.
        depth: tokens drafted at a time (K).
        folder: an empty folder, for the texts' hidden states.

    Returns:
        Name of a linear -> float32 [inputs, inputs]; inputs of later steps are weighted by the drafts per position.
    """
    model = load_drafting_model(source, torch.float32, with_layers=False)
    # The last position of a draft needs the tokens that follow.
    states = store_hidden_states(
        source, [text[: -depth - 1] for text in texts], folder, torch.float32, progress
    )
    inputs, counts = _Inputs(model.head), torch.zeros(depth + 1)
    with torch.no_grad(), inputs.collected():
        for text, hidden in zip(texts, states, strict=True):
            counts += _draft(model, text, depth, hidden, inputs)
    # Of so many positions each verify step takes one, and its accepted drafts more.
    positions, accepted = counts[0], counts[1:].sum()
    share = positions / (positions + accepted)
    first, later = inputs.sums
    return {name: sums + share * later[name] if name in later else sums for name, sums in first.items()}


def _draft(model: DraftingModel, text: Sequence[int], depth: int, hidden: Tensor, inputs: _Inputs) -> Tensor:
    """Draft from every position of a text: [depth + 1], positions, and those whose draft is right up to each step."""
    tokens = torch.tensor([list(text)])
    length = hidden.shape[1]
    unroller = DraftUnroller(model, hidden)
    inputs.rows = torch.ones(length, dtype=torch.bool)
    following, reached = tokens[:, 1 : length + 1], [length]
    for step in range(depth):
        inputs.step = min(step, _STEPS - 1)
        following = model.drafts(unroller.step(following))
        inputs.rows = inputs.rows & (following[0] == tokens[0, step + 2 : step + 2 + length])
        reached.append(int(inputs.rows.sum()))
    return torch.tensor(reached, dtype=torch.float32)
