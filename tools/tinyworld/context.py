"""The longest context that a tiny checkpoint reads as well as a short one, by transformers in float32."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (customary name)
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast

from slimqwen.models.mtp_head import DraftingModel
from tinyworld.tokenizer import END_OF_TEXT

BATCH_TOKENS = 8_192
"""Padded tokens per forward pass."""

CONTEXT_LENGTHS = (128, 256, 512, 1024, 2048, 4096)

Pairs = Sequence[tuple[Sequence[int], Sequence[int]]]
"""(context, continuation) as token ids; no context is empty."""


@dataclass(frozen=True)
class ContextPoint:
    """Bits per byte of texts that are read in windows of one length."""

    length: int
    bits_per_byte: float
    last_quarter: float
    """Bits per byte over the last quarter of each window."""


def context_sweep(
    model: DraftingModel, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]
) -> list[ContextPoint]:
    """Read the same texts in windows of each of `CONTEXT_LENGTHS`; windows are independent.

    Args:
        texts: texts at least as long as the longest window; the rest of each is not read.
    """
    longest = max(CONTEXT_LENGTHS)
    (start,) = encode(tokenizer, [END_OF_TEXT])
    rows = [text[:longest] for text in encode(tokenizer, texts)]
    # Bytes per token, so that bits are divided by the bytes of the part that is read. The world's texts are ASCII, so
    # every token consists of whole characters.
    pieces = [tokenizer.batch_decode([[token] for token in row]) for row in rows]
    sizes = [[len(piece.encode()) for piece in row] for row in pieces]
    points = []
    for length in CONTEXT_LENGTHS:
        bits = late_bits = 0.0
        size = late_size = 0
        late = length * 3 // 4
        for row, row_sizes in zip(rows, sizes, strict=True):
            windows = [(start, row[first : first + length]) for first in range(0, longest, length)]
            for number, logs in enumerate(token_log_probabilities(model, windows)):
                piece_sizes = row_sizes[number * length : (number + 1) * length]
                bits -= sum(logs) / math.log(2)
                size += sum(piece_sizes)
                late_bits -= sum(logs[late:]) / math.log(2)
                late_size += sum(piece_sizes[late:])
        points.append(ContextPoint(length, bits / size, late_bits / late_size))
    return points


def usable_context(points: Sequence[ContextPoint]) -> int:
    """The longest length up to which no length has more bits per byte than the shortest."""
    usable = points[0].length
    for point in points[1:]:
        if point.bits_per_byte > points[0].bits_per_byte:
            break
        usable = point.length
    return usable


def token_log_probabilities(model: DraftingModel, pairs: Pairs) -> list[list[float]]:
    """Log-probability of every token of each continuation."""
    widths = [len(context) + len(continuation) for context, continuation in pairs]
    batches: list[list[int]] = []
    for index in sorted(range(len(pairs)), key=widths.__getitem__):
        if not batches or widths[index] * (len(batches[-1]) + 1) > BATCH_TOKENS:
            batches.append([])
        batches[-1].append(index)
    results: list[list[float]] = [[] for _ in pairs]
    for batch in batches:
        for index, logs in zip(batch, _log_probabilities(model, [pairs[i] for i in batch]), strict=True):
            results[index] = logs
    return results


def padded(pairs: Pairs) -> Tensor:
    """The whole token ids of each pair; padding comes after the text, where a causal model cannot see it."""
    return pad_sequence([torch.tensor([*context, *text]) for context, text in pairs], batch_first=True)


def encode(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of texts; added tokens in them are recognised."""
    encodings: list[list[int]] = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    return encodings


def _log_probabilities(model: DraftingModel, pairs: Pairs) -> list[list[float]]:
    results = []
    with torch.no_grad():
        hidden = model.hidden_states(padded(pairs)[:, :-1])
        for row, (context, continuation) in enumerate(pairs):
            first = len(context) - 1
            scores = model.logits(hidden[row, first : first + len(continuation)])
            logs = -F.cross_entropy(scores, torch.tensor(list(continuation)), reduction="none")
            results.append(logs.tolist())
    return results
