"""What a smaller output head would cost: its spectrum, and bits per byte with low-rank and with 4-bit heads.

The head is W [rows, hidden], `lm_head.weight` or the embedding that it is tied to; only its use as output changes
here, never the input embedding. It is read in blocks of rows and never held whole: the eigenvectors V of its Gram
matrix are its right singular vectors, so the best head of rank r (Eckart and Young, Psychometrika 1, 1936) is
W V_r V_r', and its logits are those of W V_r on hidden states turned by V_r.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from slimqwen import checkpoint
from slimqwen.checkpoint import TensorInfo
from slimqwen.errors import SlimqwenError
from slimqwen.evaluation import statistics
from slimqwen.evaluation.rounding import rounded
from slimqwen.progress import Progress, silent

ENERGIES = (0.90, 0.95, 0.99)
"""Shares of the sum of squared singular values whose ranks are looked for."""

FRACTIONS = (0.125, 0.25, 0.5, 0.75)
"""Of hidden: ranks that are measured in addition."""

GROUPS = (32, 64, 128)
BITS = 4

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_SIXTEEN_BIT = 2
"""Bytes of a number at 16 bits, in which every head but the rounded one is counted."""

_BLOCK = 2**22
"""Numbers of the head that are in memory at a time."""

_LOGITS = 2**24
"""Logits that are in memory at a time."""


class HeadError(SlimqwenError):
    """The checkpoint has no 16- or 32-bit output head, or one that is not finite."""


@dataclass(frozen=True)
class Head:
    """Where a checkpoint's output head lies."""

    name: str
    tied: bool
    info: TensorInfo

    @property
    def rows(self) -> int:
        """Rows of the vocabulary, padding included."""
        return self.info.shape[0]

    @property
    def hidden(self) -> int:
        """Length of a row."""
        return self.info.shape[1]

    def blocks(self, rows: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """Yield (first row, float32 [at most `rows`, hidden]) from the first row to the last."""
        length = (self.info.end - self.info.start) // self.rows
        step = rows or max(1, _BLOCK // self.hidden)
        for first in range(0, self.rows, step):
            last = min(first + step, self.rows)
            read = bytearray().join(self.info.chunks(first * length, last * length))
            yield first, torch.frombuffer(read, dtype=_DTYPES[self.info.dtype]).float().view(-1, self.hidden)


@dataclass(frozen=True)
class Spectrum:
    """A head's singular values and right singular vectors.

    Attributes:
        singular_values: float64 [hidden], largest first. Those below 1e-7 of the largest are noise: their squares
            are lost in the rounding of the Gram matrix.
        vectors: float64 [hidden, hidden], a column a value.
    """

    singular_values: Tensor
    vectors: Tensor

    def energy(self, rank: int) -> float:
        """Share of the sum of squared singular values in the first `rank`."""
        squares = self.singular_values.square()
        return float(squares[:rank].sum() / squares.sum())

    def rank(self, energy: float) -> int:
        """The smallest rank with at least that share."""
        shares = self.singular_values.square().cumsum(0)
        return int(torch.searchsorted(shares, energy * shares[-1])) + 1

    def relative_error(self, rank: int) -> float:
        """||W - W_rank|| / ||W||, Frobenius norms, of the best head of that rank."""
        squares = self.singular_values.square()
        return math.sqrt(float(squares[rank:].sum() / squares.sum()))


def find(folder: Path) -> Head:
    """A checkpoint's output head: lm_head.weight, else the embedding.

    Raises:
        HeadError: it has neither in 16 or 32 bits, or no lm_head although its config unties the two.
        CorruptCheckpointError: as `checkpoint.tensors`.
    """
    config = checkpoint.read_config(folder)
    stored = checkpoint.tensors(folder)
    tied = "lm_head.weight" not in stored
    if tied and not config.get(
        "tie_word_embeddings", checkpoint.text_config(config).get("tie_word_embeddings")
    ):
        raise HeadError(
            f"{folder} has no lm_head.weight, yet its config ties no embeddings; use a 16-bit checkpoint"
        )
    suffix = "embed_tokens.weight" if tied else "lm_head.weight"
    names = [name for name in stored if name.endswith(suffix) and not name.startswith("mtp.")]
    if len(names) != 1 or stored[names[0]].dtype not in _DTYPES:
        raise HeadError(f"{folder} has no {suffix} in 16 or 32 bits; use a language model of 16 bits")
    return Head(names[0], tied, stored[names[0]])


def spectrum(head: Head, progress: Progress = silent) -> Spectrum:
    """Singular values from the Gram matrix, summed over blocks of rows in float64.

    Raises:
        HeadError: a value is NaN or infinite, or all are zero.
    """
    gram = torch.zeros(head.hidden, head.hidden, dtype=torch.float64)
    for first, block in head.blocks():
        progress("summing the Gram matrix", first, head.rows)
        gram += block.double().T @ block.double()
    if not gram.isfinite().all() or not gram.any():
        raise HeadError(f"{head.info.file}: {head.name} is zero or not finite; make that checkpoint anew")
    squares, vectors = torch.linalg.eigh(gram)
    return Spectrum(squares.flip(0).clamp_min(0).sqrt(), vectors.flip(1))


def analyse(
    folder: Path, texts: Sequence[str], fractions: Sequence[float] = FRACTIONS, progress: Progress = silent
) -> dict[str, Any]:
    """Spectrum, error, size and bits per byte of smaller heads.

    Args:
        folder: the checkpoint; its model is held in float32.
        texts: held-out ones, at least two; each is read after the token that ends a text.
        fractions: of hidden, ranks to measure beside those of `ENERGIES`.
        progress: hears texts read and rows done.

    Returns:
        {"head": {"tensor", "tied", "rows", "hidden", "bytes"}, "singular_values", "ranks": {energy: rank}, "texts":
        {"documents", "bytes", "tokens"}, "bits_per_byte", "groups_left_out", "heads": [{"kind": "low_rank" with
        "rank" and "energy", or "rounded" with "bits" and "group"; "relative_error", "bytes", "bytes_share",
        "bits_per_byte", "bits_per_byte_change"}]}. Bytes count 16 bits for all but rounded weights; the error is
        ||W - W'|| / ||W||; bits per byte are `statistics.Estimate`s over documents, weighted by bytes, the change a
        paired `statistics.Difference` to the whole head. Arithmetic is float32: that a low-rank head's factors are
        stored in 16 bits is counted but not felt. Groups that do not divide hidden are left out.

    Raises:
        HeadError: as `find` and `spectrum`, or a text is empty.
        TooFewItemsError: fewer than two texts.
    """
    head = find(folder)
    found = spectrum(head, progress)
    ranks = {str(energy): found.rank(energy) for energy in ENERGIES}
    measured = sorted({*ranks.values(), *(max(1, round(share * head.hidden)) for share in fractions)})
    groups = [group for group in GROUPS if head.hidden % group == 0]
    if not all(texts):
        raise HeadError("a text to score is empty; take it out")
    states, targets, lengths = _read(folder, texts, progress)
    logs, errors = _scores(head, states, targets, found.vectors.float(), measured, groups, progress)
    sizes = [len(text.encode()) for text in texts]

    def bits(of: Tensor) -> list[float]:
        sums = [float(part.sum()) for part in of.split(lengths)]
        return [-nats / math.log(2) / size for nats, size in zip(sums, sizes, strict=True)]

    whole_bytes = head.rows * head.hidden * _SIXTEEN_BIT
    whole = bits(logs["whole"])

    def row(key: str, described: dict[str, Any], error: float, size: int) -> dict[str, Any]:
        changed = bits(logs[key])
        return {
            **described,
            "relative_error": error,
            "bytes": size,
            "bytes_share": size / whole_bytes,
            "bits_per_byte": asdict(statistics.mean(changed, sizes)),
            "bits_per_byte_change": asdict(statistics.paired_difference(whole, changed, sizes)),
        }

    low_rank = [
        row(
            f"rank {rank}",
            {"kind": "low_rank", "rank": rank, "energy": found.energy(rank)},
            found.relative_error(rank),
            (head.rows + head.hidden) * rank * _SIXTEEN_BIT,
        )
        for rank in measured
    ]
    numbers = head.rows * head.hidden
    four_bit = [
        row(
            f"group {group}",
            {"kind": "rounded", "bits": BITS, "group": group},
            errors[f"group {group}"],
            numbers * BITS // 8 + numbers // group * _SIXTEEN_BIT,
        )
        for group in groups
    ]
    return {
        "head": {
            "tensor": head.name,
            "tied": head.tied,
            "rows": head.rows,
            "hidden": head.hidden,
            "bytes": whole_bytes,
        },
        "singular_values": [float(f"{value:.6g}") for value in found.singular_values.tolist()],
        "ranks": ranks,
        "texts": {"documents": len(texts), "bytes": sum(sizes), "tokens": len(targets)},
        "bits_per_byte": asdict(statistics.mean(whole, sizes)),
        "groups_left_out": [group for group in GROUPS if group not in groups],
        "heads": low_rank + four_bit,
    }


def _read(folder: Path, texts: Sequence[str], progress: Progress) -> tuple[Tensor, Tensor, list[int]]:
    """What the head is given before every token of the texts [tokens, hidden], the tokens, tokens of each text."""
    config = checkpoint.read_config(folder)
    architecture = getattr(transformers, config["architectures"][0])
    model = architecture.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    settings = folder / "generation_config.json"
    generation = json.loads(settings.read_bytes()) if settings.is_file() else {}
    start = generation.get("pad_token_id", checkpoint.text_config(config)["eos_token_id"])
    states, targets = [], []
    for done, text in enumerate(texts):
        progress("reading texts", done, len(texts))
        ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        before = torch.cat([torch.tensor([start]), ids])[None, :-1]
        with torch.inference_mode():
            states.append(model.model(before, use_cache=False).last_hidden_state[0])
        targets.append(ids)
    return torch.cat(states), torch.cat(targets), [len(ids) for ids in targets]


def _scores(
    head: Head,
    states: Tensor,
    targets: Tensor,
    vectors: Tensor,
    ranks: Sequence[int],
    groups: Sequence[int],
    progress: Progress,
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Log-probability of each target under each head, and the rounded heads' errors, in one pass over the rows."""
    keys = ["whole", *(f"rank {rank}" for rank in ranks), *(f"group {group}" for group in groups)]
    sums = {key: torch.full((len(targets),), -math.inf, dtype=torch.float64) for key in keys}
    picked = {key: torch.zeros(len(targets), dtype=torch.float64) for key in keys}
    lost = dict.fromkeys(keys, 0.0)
    total = 0.0

    def note(key: str, logits: Tensor) -> None:
        sums[key] = torch.logaddexp(sums[key], logits.logsumexp(dim=1).double())
        picked[key][inside] = logits[inside, targets[inside] - first].double()

    with torch.inference_mode():
        turned = states @ vectors
        for first, block in head.blocks(max(1, min(_BLOCK // head.hidden, _LOGITS // len(targets)))):
            progress("scoring heads", first, head.rows)
            inside = ((targets >= first) & (targets < first + len(block))).nonzero()[:, 0]
            total += float(block.double().square().sum())
            note("whole", states @ block.T)
            turned_block = block @ vectors
            for rank in ranks:
                note(f"rank {rank}", turned[:, :rank] @ turned_block[:, :rank].T)
            for group in groups:
                new = rounded(block, group, BITS)
                lost[f"group {group}"] += float((new.double() - block.double()).square().sum())
                note(f"group {group}", states @ new.T)
    errors = {key: math.sqrt(value / total) for key, value in lost.items()}
    return {key: picked[key] - sums[key] for key in keys}, errors
