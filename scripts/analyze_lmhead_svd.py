"""How small could the output head of a variant be? Its spectrum, and a comparison with low-rank and 4-bit heads.

The head is W [rows, hidden]. The right singular vectors V of W are the eigenvectors of its Gram matrix, and its best
approximation of rank r is W V_r V_r' (Eckart and Young, Psychometrika 1, 1936). 4-bit heads are rounded to nearest.
Every head predicts the tokens of the held-out documents of --text; the input embedding is not changed.

    .venv/bin/python scripts/analyze_lmhead_svd.py --variant tiny --text eval/tasks/tinyworld/prose.jsonl
"""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from slimqwen.checkpoint.errors import CorruptCheckpointError
from slimqwen.checkpoint.rtn import round_to_nearest
from slimqwen.checkpoint.tensors import find_output_head, list_tensors
from slimqwen.cli.exploration import run_exploration
from slimqwen.formats.compressed_tensors import PackedIntegers
from slimqwen.models.language_model import load_in_float32
from slimqwen.records.table import Table
from slimqwen.stats import intervals
from slimqwen.text.chats import read_texts
from slimqwen.variant import Variant

RANK_SHARES = (0.125, 0.25, 0.5, 0.75)
GROUP_SIZES = (32, 64, 128)
BLOCK_ROWS = 4096
ChangeRows = Callable[[Tensor], Tensor]
"""Rows of the head, float32 [rows, hidden] -> the rows that replace them, of the same shape."""


def decompose_head(head: Tensor) -> tuple[Tensor, Tensor]:
    """Singular values, largest first [hidden], and right singular vectors [hidden, hidden], both float64."""
    gram = torch.zeros(head.shape[1], head.shape[1], dtype=torch.float64)
    for block in head.split(BLOCK_ROWS):
        gram += block.double().T @ block.double()
    squares, vectors = torch.linalg.eigh(gram)
    return squares.flip(0).clamp_min(0).sqrt(), vectors.flip(1)


def list_heads(head: Tensor, vectors: Tensor) -> dict[str, tuple[int, ChangeRows]]:
    """The 16-bit head and each smaller head: name -> size in bytes, and the function that changes rows to its rows."""
    rows, hidden = head.shape
    heads: dict[str, tuple[int, ChangeRows]] = {"16 bit": (2 * rows * hidden, lambda block: block)}
    for rank in (round(share * hidden) for share in RANK_SHARES):
        projection = (vectors[:, :rank] @ vectors[:, :rank].T).float()
        heads[f"rank {rank}"] = 2 * rank * (rows + hidden), partial(torch.matmul, other=projection)
    for group in (size for size in GROUP_SIZES if hidden % size == 0):
        rounding = partial(round_to_nearest, form=PackedIntegers(4, group))
        heads[f"4 bit, groups of {group}"] = rows * hidden // 2 + 2 * rows * hidden // group, rounding
    return heads


def read_states(folder: Path, texts: Sequence[str]) -> tuple[Tensor, Tensor, list[int]]:
    """Inputs of the head, float32 [tokens, hidden]; the token id after each; and the number of tokens of each text."""
    model = load_in_float32(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    states, targets = [], []
    for text in texts:
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]], device=model.device)
        with torch.inference_mode():
            states.append(model.model(ids, use_cache=False).last_hidden_state[0, :-1].cpu())
        targets.append(ids[0, 1:].cpu())
    return torch.cat(states), torch.cat(targets), [len(ids) for ids in targets]


def measure_head(head: Tensor, change: ChangeRows, states: Tensor, targets: Tensor) -> tuple[float, Tensor]:
    """||W - W'|| / ||W|| (Frobenius norms), and the log-probability of every target token, float64 [tokens]."""
    squared_error = squared_norm = 0.0
    log_sums = torch.full((len(targets),), -math.inf, dtype=torch.float64)
    target_logits = torch.zeros(len(targets), dtype=torch.float64)
    for first in range(0, len(head), BLOCK_ROWS):  # a row of logits per token would not fit into memory
        block = head[first : first + BLOCK_ROWS].float()
        changed = change(block)
        squared_error += float((changed - block).double().square().sum())
        squared_norm += float(block.double().square().sum())
        logits = states @ changed.T
        log_sums = torch.logaddexp(log_sums, logits.logsumexp(1).double())
        inside = ((targets >= first) & (targets < first + len(block))).nonzero()[:, 0]
        target_logits[inside] = logits[inside, targets[inside] - first].double()
    return math.sqrt(squared_error / squared_norm), target_logits - log_sums


def explore_heads(variant: Variant, options: argparse.Namespace) -> tuple[Table, dict[str, Any]]:
    """Measure the 16-bit head and every smaller one on the documents of --text."""
    tensors = list_tensors(variant.weights)
    names = find_output_head(tensors)
    if len(names) != 1:
        raise CorruptCheckpointError(
            f"{variant.weights} has no output head in 16 bits; choose a variant that has one"
        )
    head = tensors[names[0]].unchanged().read()
    singular_values, vectors = decompose_head(head)
    texts = [text[:8192] for text in islice(read_texts(options.text, variant.weights), options.documents)]
    states, targets, lengths = read_states(variant.weights, texts)
    sizes = [len(text.encode()) for text in texts]
    figures: dict[str, dict[str, Any]] = {}
    full_bits: list[float] = []
    for label, (size, change) in list_heads(head, vectors).items():
        error, log_probabilities = measure_head(head, change, states, targets)
        parts = zip(log_probabilities.split(lengths), sizes, strict=True)
        bits = [-float(part.sum()) / math.log(2) / length for part, length in parts]
        full_bits = full_bits or bits
        loss = asdict(intervals.paired_difference(full_bits, bits, sizes))
        mean = intervals.mean(bits, sizes).value
        figures[label] = {"bytes": size, "error": error, "bits_per_byte": mean, "change": loss}
    columns: dict[str, Callable[[str], object]] = {
        "head": lambda label: label,
        "MB": lambda label: f"{figures[label]['bytes'] / 1e6:.2f}",
        "||W - W'|| / ||W||": lambda label: f"{figures[label]['error']:.4f}",
        "bits/byte": lambda label: f"{figures[label]['bits_per_byte']:.4f}",
        "change ± SE": lambda label: "{value:+.4f} ± {standard_error:.4f}".format(**figures[label]["change"]),
    }
    energies = singular_values.square().cumsum(0) / singular_values.square().sum()
    ranks = ", ".join(f"{int((energies < share).sum()) + 1} for {share:.0%}" for share in (0.9, 0.95, 0.99))
    note = f"Rank by share of the squared singular values: {ranks}."
    table = Table.from_rows(f"{names[0]} {list(head.shape)} of {variant.name}", figures, columns, note)
    return table, {"singular_values": singular_values.tolist(), "heads": figures}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Spectrum of a variant's output head, and smaller heads.")
    parser.add_argument("--text", type=Path, required=True, help="held-out documents, .txt or .jsonl")
    parser.add_argument("--documents", type=int, default=60, help="documents, 8,192 characters of each")
    run_exploration("lmhead_svd", parser, explore_heads)
