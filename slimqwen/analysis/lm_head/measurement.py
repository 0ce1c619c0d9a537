"""Measurement of smaller output heads of a variant, in float32 on the CPU."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimqwen.analysis.float32_model import load_model
from slimqwen.analysis.lm_head import output_head
from slimqwen.analysis.lm_head.output_head import Head, HeadError
from slimqwen.analysis.lm_head.record import HeadShape, LmHead, LowRankHead, RoundedHead, ScoredTexts
from slimqwen.checkpoint.files import sha256
from slimqwen.progress import Progress, silent
from slimqwen.records import provenance, store
from slimqwen.stats import intervals
from slimqwen.text.corpus import file_texts
from slimqwen.variant import Variant

if TYPE_CHECKING:
    from torch import Tensor

ENERGIES = (0.90, 0.95, 0.99)
"""Shares of the sum of squared singular values whose ranks are measured."""

FRACTIONS = (0.125, 0.25, 0.5, 0.75)
"""Further ranks to measure, as fractions of the hidden size."""

GROUP_SIZES = (32, 64, 128)
BITS = 4

_NUMBER_BYTES = 2
"""Bytes per number of every head but the 4-bit ones."""

_BLOCK_LOGITS = 2**24
"""Logits in memory at once."""

_SCORED_CHARACTERS = 8_192
"""Characters of a document that are scored."""


def write(
    variant: Variant,
    text: Path | None,
    *,
    num_documents: int,
    fractions: Sequence[float],
    command: Sequence[str],
    progress: Progress = silent,
) -> Path:
    """Analyse the output head of a variant and write the record.

    Args:
        text: held-out .txt or .jsonl file to score; None is the tiny world's prose, for variants of tiny.
        num_documents: documents of the text, each cut to 8,192 characters.
        fractions: as `FRACTIONS`.

    Raises:
        HeadError: as `analyse`, no text for this variant, or a fraction outside (0, 1].
    """
    started = provenance.utc_now()
    if text is None and "tiny" not in variant.lineage:
        raise HeadError(f"{variant.name} has no default text; name a held-out file with --text")
    if not all(0 < fraction <= 1 for fraction in fractions):
        raise HeadError("a fraction of the hidden size must be above 0 and at most 1; change --fractions")
    file = text or variant.root / "eval" / "tasks" / "tinyworld" / "prose.jsonl"
    variant.require_weights()
    documents = islice(file_texts(file), num_documents)
    texts = [document[:_SCORED_CHARACTERS] for document in documents if document.strip()]
    fields = analyse(variant.weights, texts, fractions, progress)
    block = provenance.of_variant(
        variant,
        command,
        started,
        text={"file": provenance.portable(str(file), variant.root), "sha256": sha256(file)},
    )
    return store.write(variant.root / "results", LmHead(variant=variant.name, provenance=block, **fields))


def analyse(
    folder: Path, texts: Sequence[str], fractions: Sequence[float] = FRACTIONS, progress: Progress = silent
) -> dict[str, Any]:
    """Spectrum of the head; error, size and bits per byte of smaller heads.

    Bits per byte are means over documents weighted by bytes. Group sizes that do not divide the hidden size are left
    out.

    Args:
        folder: checkpoint; its model is held in float32.
        texts: held-out texts, at least two, none empty; each is scored after the end-of-text token.
        fractions: as `FRACTIONS`.

    Raises:
        HeadError: as `output_head.find` and `output_head.spectrum`.
        TooFewItemsError: fewer than two texts.
    """
    head = output_head.find(folder)
    decomposition = output_head.spectrum(head, progress)
    ranks = {str(energy): decomposition.rank(energy) for energy in ENERGIES}
    measured_ranks = sorted({*ranks.values(), *(max(1, round(share * head.hidden)) for share in fractions)})
    groups = [group for group in GROUP_SIZES if head.hidden % group == 0]
    states, targets, lengths = _hidden_states(folder, texts, progress)
    log_probabilities, rounding_errors = _scores(
        head, states, targets, decomposition.vectors.float(), measured_ranks, groups, progress
    )
    sizes = [len(text.encode()) for text in texts]

    def bits(log_probability: "Tensor") -> list[float]:
        sums = [float(part.sum()) for part in log_probability.split(lengths)]
        return [-nats / math.log(2) / size for nats, size in zip(sums, sizes, strict=True)]

    numbers = head.rows * head.hidden
    full_bytes = numbers * _NUMBER_BYTES
    full_bits = bits(log_probabilities["full"])

    def figures(key: str, size: int) -> dict[str, Any]:
        head_bits = bits(log_probabilities[key])
        return {
            "bytes": size,
            "bytes_share": size / full_bytes,
            "bits_per_byte": asdict(intervals.mean(head_bits, sizes)),
            "bits_per_byte_change": asdict(intervals.paired_difference(full_bits, head_bits, sizes)),
        }

    low_rank = [
        LowRankHead(
            kind="low_rank",
            rank=rank,
            energy=decomposition.energy(rank),
            relative_error=decomposition.relative_error(rank),
            **figures(f"rank {rank}", (head.rows + head.hidden) * rank * _NUMBER_BYTES),
        )
        for rank in measured_ranks
    ]
    four_bit = [
        RoundedHead(
            kind="rounded",
            bits=BITS,
            group=group,
            relative_error=rounding_errors[group],
            **figures(f"group {group}", numbers * BITS // 8 + numbers // group * _NUMBER_BYTES),
        )
        for group in groups
    ]
    return {
        "head": HeadShape(
            tensor=head.name, tied=head.tied, rows=head.rows, hidden=head.hidden, bytes=full_bytes
        ),
        "singular_values": [float(f"{value:.6g}") for value in decomposition.singular_values.tolist()],
        "ranks": ranks,
        "texts": ScoredTexts(documents=len(texts), bytes=sum(sizes), tokens=len(targets)),
        "bits_per_byte": asdict(intervals.mean(full_bits, sizes)),
        "groups_left_out": [group for group in GROUP_SIZES if group not in groups],
        "heads": [*low_rank, *four_bit],
    }


def _hidden_states(
    folder: Path, texts: Sequence[str], progress: Progress
) -> "tuple[Tensor, Tensor, list[int]]":
    """Inputs of the head before each token [tokens, hidden], the tokens, and the number of tokens of each text."""
    import torch
    import transformers

    model, end_of_text = load_model(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    states, targets = [], []
    for done, text in enumerate(texts):
        progress("read the texts", done, len(texts))
        ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        inputs = torch.cat([torch.tensor([end_of_text]), ids])[None, :-1]
        with torch.inference_mode():
            states.append(model.model(inputs, use_cache=False).last_hidden_state[0])
        targets.append(ids)
    return torch.cat(states), torch.cat(targets), [len(ids) for ids in targets]


def _scores(
    head: Head,
    states: "Tensor",
    targets: "Tensor",
    vectors: "Tensor",
    ranks: Sequence[int],
    groups: Sequence[int],
    progress: Progress,
) -> "tuple[dict[str, Tensor], dict[int, float]]":
    """Score the targets under every head in one pass over the rows.

    Returns:
        Log-probability of each token given those before it by head, float64 [tokens]; ||W - W'|| / ||W|| by group size.
    """
    import torch

    from slimqwen.checkpoint.rtn import round_to_nearest

    keys = ["full", *(f"rank {rank}" for rank in ranks), *(f"group {group}" for group in groups)]
    log_sums = {key: torch.full((len(targets),), -math.inf, dtype=torch.float64) for key in keys}
    target_logits = {key: torch.zeros(len(targets), dtype=torch.float64) for key in keys}
    squared_errors = dict.fromkeys(groups, 0.0)
    total = 0.0

    def add(key: str, logits: "Tensor") -> None:
        log_sums[key] = torch.logaddexp(log_sums[key], logits.logsumexp(dim=1).double())
        target_logits[key][in_block] = logits[in_block, targets[in_block] - first].double()

    rows_at_once = max(1, min(output_head.BLOCK_NUMBERS // head.hidden, _BLOCK_LOGITS // len(targets)))
    with torch.inference_mode():
        rotated_states = states @ vectors
        for first, block in head.blocks(rows_at_once):
            progress("score the heads", first, head.rows)
            in_block = ((targets >= first) & (targets < first + len(block))).nonzero()[:, 0]
            total += float(block.double().square().sum())
            add("full", states @ block.T)
            rotated_block = block @ vectors
            for rank in ranks:
                add(f"rank {rank}", rotated_states[:, :rank] @ rotated_block[:, :rank].T)
            for group in groups:
                rounded = round_to_nearest(block, group, BITS)
                squared_errors[group] += float((rounded.double() - block.double()).square().sum())
                add(f"group {group}", states @ rounded.T)
    return (
        {key: target_logits[key] - log_sums[key] for key in keys},
        {group: math.sqrt(error / total) for group, error in squared_errors.items()},
    )
