"""The learning curve of a training run: a quick evaluation that compares likeliest tokens, without generation."""

import math
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerFast

from slimqwen.models.mtp_head import DraftingModel
from tinyworld.documents import render_completion
from tinyworld.measure import Pairs, encode, padded, token_log_probabilities
from tinyworld.tasks import QUESTION_TASKS, TaskItems
from tinyworld.tokenizer import END_OF_TEXT

ITEM_STRIDE = 7
"""Every seventh test item is evaluated; coprime to the number of instruction kinds."""

_BATCH = 64


@dataclass(frozen=True)
class CurvePoint:
    """One point of the learning curve."""

    step: int
    loss: float
    """Mean weighted cross-entropy since the previous point, nats per token."""
    draft_loss: float
    """The same for the first step of the MTP head."""
    prose_bits_per_token: float
    facts: float
    """Share of fact items whose every answer token was the likeliest."""
    format: float
    """Share of instructions with exactly the stored answer; a lower bound, because several answers may be right."""
    twohop: float
    """Share of two-hop items with exactly the stored reasoning and answer; a lower bound of the task's score."""


class CurveEvaluation:
    """Measures points of a learning curve on a fixed sample of the test items."""

    def __init__(self, items: TaskItems, tokenizer: PreTrainedTokenizerFast) -> None:
        def encoded(prompts: list[str], completions: list[str]) -> Pairs:
            return list(zip(encode(tokenizer, prompts), encode(tokenizer, completions), strict=True))

        self._pairs = {}
        for task in QUESTION_TASKS:
            rows = items[task][::ITEM_STRIDE]
            completions = [render_completion(row["answer"], row.get("reasoning")) for row in rows]
            self._pairs[task] = encoded([row["prompt"] for row in rows], completions)
        short = [row["text"] for row in items["prose"] if row["kind"] != "long"]
        self._prose = encoded([END_OF_TEXT] * len(short), short)

    def measure(self, model: DraftingModel, step: int, loss: float, draft_loss: float) -> CurvePoint:
        """The point of the learning curve at a step."""
        with torch.no_grad():
            exact = {task: _share_exact(model, pairs) for task, pairs in self._pairs.items()}
            bits = _bits_per_token(model, self._prose)
        return CurvePoint(step, loss, draft_loss, bits, **exact)


def _share_exact(model: DraftingModel, pairs: Pairs) -> float:
    exact = 0
    for start in range(0, len(pairs), _BATCH):
        chunk = pairs[start : start + _BATCH]
        likeliest = model.logits(model.hidden_states(padded(chunk))).argmax(dim=-1)
        for row, (prompt, completion) in zip(likeliest, chunk, strict=True):
            first = len(prompt) - 1
            exact += row[first : first + len(completion)].tolist() == completion
    return exact / len(pairs)


def _bits_per_token(model: DraftingModel, pairs: Pairs) -> float:
    logs = token_log_probabilities(model, pairs)
    return -math.fsum(map(sum, logs)) / sum(map(len, logs)) / math.log(2)
