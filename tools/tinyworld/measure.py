"""Scores of a tiny checkpoint, measured in this process by transformers in float32, without server and lm-eval.

Items, prompts and scorers are those of the lm-eval tasks, so the scores agree with a server's up to near ties.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (customary name)
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast

from slimqwen.models import vocabulary
from slimqwen.models.mtp_head import Acceptance, DraftingModel, measure_acceptance
from slimqwen.progress import Progress, silent
from slimqwen.stats import intervals
from tinyworld.generation import continue_greedily
from tinyworld.tasks import GENERATION_TOKENS, Row, margin, score_answer
from tinyworld.tokenizer import END_OF_TEXT, end_token_ids

BATCH_TOKENS = 8_192
"""Padded tokens per forward pass."""

ACCEPTANCE_DEPTH = 4
ACCEPTANCE_TOKENS = 96
"""Longest continuation for measuring acceptance, tokens."""

CONTEXT_LENGTHS = (128, 256, 512, 1024, 2048, 4096)

Pairs = Sequence[tuple[Sequence[int], Sequence[int]]]
"""(context, continuation) as token ids; no context is empty."""


@dataclass(frozen=True)
class Scores:
    """One value per item, with weights."""

    values: tuple[float, ...]
    weights: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Weighted mean."""
        return intervals.mean(self.values, self.weights).value

    @property
    def standard_error(self) -> float:
        """Standard error of the weighted mean; items are independent."""
        return intervals.mean(self.values, self.weights).standard_error

    def minus(self, other: "Scores") -> "Scores":
        """Differences by item, for a paired comparison."""
        differences = tuple(a - b for a, b in zip(self.values, other.values, strict=True))
        return Scores(differences, self.weights)


def unweighted(values: Sequence[float]) -> Scores:
    """Scores with equal weights."""
    return Scores(tuple(float(value) for value in values), (1.0,) * len(values))


def answer_items(
    model: DraftingModel,
    tokenizer: PreTrainedTokenizerFast,
    task: str,
    rows: Sequence[Row],
    progress: Progress = silent,
) -> Scores:
    """Generate an answer to every item and score it: 1 right, 0 wrong.

    Args:
        task: one of `tasks.QUESTION_TASKS`.
        progress: receives (activity, done, total) in items.
    """
    prompts = encode(tokenizer, [row["prompt"] for row in rows])
    answers = continue_greedily(
        model.backbone, prompts, GENERATION_TOKENS[task], end_token_ids(), progress=progress
    )
    texts = tokenizer.batch_decode(answers, skip_special_tokens=False)
    return unweighted([score_answer(task, row, text) for row, text in zip(rows, texts, strict=True)])


def answer_margins(model: DraftingModel, tokenizer: PreTrainedTokenizerFast, rows: Sequence[Row]) -> Scores:
    """The answer log-probability gap of each item, nats."""
    pairs = [
        (prompt, option)
        for prompt, row in zip(encode(tokenizer, [row["prompt"] for row in rows]), rows, strict=True)
        for option in encode(tokenizer, row["options"])
    ]
    sums = [sum(logs) for logs in token_log_probabilities(model, pairs)]
    margins = []
    for row in rows:
        count = len(row["options"])
        margins.append(margin(sums[:count], row["gold"]))
        sums = sums[count:]
    return unweighted(margins)


def bits_per_byte(model: DraftingModel, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> Scores:
    """Bits per UTF-8 byte of each text, read after `<|endoftext|>`."""
    (start,) = encode(tokenizer, [END_OF_TEXT])
    logs = token_log_probabilities(model, [(start, text) for text in encode(tokenizer, texts)])
    sizes = [float(len(text.encode())) for text in texts]
    bits = [-sum(row) / math.log(2) / size for row, size in zip(logs, sizes, strict=True)]
    return Scores(tuple(bits), tuple(sizes))


def prose_acceptance(
    model: DraftingModel, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]
) -> Acceptance:
    """Acceptance of drafts on the model's own continuations of held-out texts.

    The prompt is the first third of a text, at most 200 tokens; the continuation is greedy and ends with the text.
    """
    encoded = encode(tokenizer, texts)
    prompts = [text[: min(max(4, len(text) // 3), 200)] for text in encoded]
    continuations = continue_greedily(model.backbone, prompts, ACCEPTANCE_TOKENS, end_token_ids())
    return measure_acceptance(model, list(zip(prompts, continuations, strict=True)), ACCEPTANCE_DEPTH)


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


def rounded_to_bits(model: DraftingModel, bits: int, group: int | None = None) -> DraftingModel:
    """A copy whose linears (without embedding and head) are rounded to nearest (RTN), asymmetric.

    Args:
        group: weights of a row that share a scale; None for a whole row.
    """
    damaged = DraftingModel(copy.deepcopy(model.backbone), model.head)
    with torch.no_grad():
        for name, module in damaged.backbone.model.named_modules():
            if isinstance(module, nn.Linear) and name:
                module.weight.copy_(_rounded(module.weight, bits, group or module.weight.shape[1]))
    return damaged


def with_half_vocabulary(
    model: DraftingModel, tokenizer: PreTrainedTokenizerFast
) -> tuple[DraftingModel, PreTrainedTokenizerFast]:
    """A copy with the first half of the tokens: added tokens, bytes, and the earliest merges.

    Merges are ordered by frequency and build on earlier ones, so the first half is a valid BPE by itself.
    """
    size = model.backbone.config.vocab_size // 2
    whole = vocabulary.parse(tokenizer.backend_tokenizer.to_str(), "the tokenizer")
    smaller = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(vocabulary.prune(whole, np.arange(size))),
        eos_token=tokenizer.eos_token,
        pad_token=tokenizer.pad_token,
    )
    backbone = copy.deepcopy(model.backbone)
    rows = backbone.model.embed_tokens.weight.detach()[:size].clone()
    backbone.model.embed_tokens = nn.Embedding.from_pretrained(rows)
    backbone.lm_head.weight = backbone.model.embed_tokens.weight
    return DraftingModel(backbone, model.head).eval(), smaller


def with_shuffled_head(model: DraftingModel) -> DraftingModel:
    """A copy whose MTP head has the columns of `fc` in random order."""
    head = copy.deepcopy(model.head)
    with torch.no_grad():
        order = torch.randperm(head.fc.weight.shape[1], generator=torch.Generator().manual_seed(0))
        head.fc.weight.copy_(head.fc.weight[:, order])
    return DraftingModel(model.backbone, head)


def _rounded(weight: Tensor, bits: int, group: int) -> Tensor:
    groups = weight.reshape(-1, group)
    low, high = groups.amin(dim=1, keepdim=True), groups.amax(dim=1, keepdim=True)
    step = ((high - low) / (2**bits - 1)).clamp_min(1e-8)
    return (((groups - low) / step).round() * step + low).reshape(weight.shape)


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
