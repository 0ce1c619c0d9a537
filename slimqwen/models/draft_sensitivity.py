"""Measures what each change of the drafts costs in acceptance, alone and in memory, without writing a checkpoint.

The MTP head drafts on the target's own greedy outputs, as in `mtp_head`, once as it is and once with each change.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from slimqwen.checkpoint import packing
from slimqwen.checkpoint.rtn import round_to_nearest
from slimqwen.formats.compressed_tensors import PackedIntegers, matches
from slimqwen.models.hidden_states import store_hidden_states
from slimqwen.models.mtp_head import (
    PREFIX,
    DraftHead,
    DraftingModel,
    count_served_steps,
    load_drafting_model,
    summarise_acceptance,
)
from slimqwen.progress import Progress

Text = tuple[Sequence[int], Sequence[int]]
"""Token ids of a prompt, and of the target's greedy continuation."""


@dataclass(frozen=True)
class DraftChange:
    """A change of the drafts. Default values change nothing.

    Attributes:
        head: layout to which the MTP head's linears are rounded; None for 16 bits.
        token_ids: the only ids that may be drafted; None for all.
        rows: layout to which the output head of the drafts is rounded; None for 16 bits.
    """

    head: PackedIntegers | None = None
    token_ids: Sequence[int] | None = None
    rows: PackedIntegers | None = None


def measure_draft_rates(
    source: Path,
    texts: Sequence[Text],
    changes: Sequence[DraftChange],
    depth: int,
    folder: Path,
    progress: Progress,
) -> list[list[float]]:
    """Measure the acceptance rates of drafts with each change alone.

    Args:
        source: checkpoint with an MTP head in 16 bits, in which nothing is quantised.
        texts: token ids of a prompt and of the target's greedy continuation, for each text.
        depth: tokens drafted at a time (K).
        folder: an empty folder, for the texts' hidden states.

    Returns:
        For each change, a rate at each position 1..K: the share of verify steps that accept the draft's tokens up to
        and including that position.

    Raises:
        MtpHeadError: the texts are too short for a single draft.
    """
    model = load_drafting_model(source, torch.float32, with_layers=False)
    # The last position of a draft needs the tokens that follow.
    long = [text for text in texts if len(text[0]) + len(text[1]) > depth + 1]
    states = store_hidden_states(
        source, [[*prompt, *answer][: -depth - 1] for prompt, answer in long], folder, torch.float32, progress
    )
    rates = []
    for number, change in enumerate(changes):
        progress("measuring what changes of the drafts cost", number, len(changes))
        with _changed(model, change):
            steps = count_served_steps(model, long, depth, states)
        rates.append(list(summarise_acceptance(steps, depth).rates))
    return rates


@contextmanager
def _changed(model: DraftingModel, change: DraftChange) -> Iterator[None]:
    kept = {name: tensor.clone() for name, tensor in model.head.state_dict().items()}
    if change.head:
        for name, module in model.head.named_modules():
            if matches(packing.LINEARS["mtp"], f"{PREFIX}{name}"):
                module.weight.data = round_to_nearest(module.weight.data, change.head)
    weight = model.backbone.lm_head.weight.detach()
    if change.token_ids is not None or change.rows:
        ids = torch.tensor(range(len(weight)) if change.token_ids is None else change.token_ids)
        rows = weight[ids]
        model.draft_head = DraftHead(round_to_nearest(rows, change.rows) if change.rows else rows, ids)
    yield
    model.head.load_state_dict(kept)
    model.draft_head = None
