"""How small could the vocabulary of a variant be? Coverage, growth of texts and bits per byte at smaller sizes.

Tokens are ranked on a corpus as by the stage prune_vocab, except its held-out documents; these, and the files of
--text, are measured. A pruned model is the original model with its logits cut to the rows that are kept, so the
original gives the bits per byte of the pruned model without a new checkpoint.

    .venv/bin/python scripts/analyze_vocab.py --variant tiny --corpus text.jsonl --size 4096 --size 6144
"""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from slimqwen import checkpoint
from slimqwen.cli.exploration import run_exploration
from slimqwen.models import vocabulary
from slimqwen.models.language_model import load_in_float32
from slimqwen.models.vocabulary import Ids, Vocabulary
from slimqwen.recipe.stages import prune_vocab
from slimqwen.recipe.stages.prune_vocab import CountedText
from slimqwen.records.table import Table
from slimqwen.stats import intervals
from slimqwen.text.chats import read_texts
from slimqwen.variant import Variant

SCORED_CHARACTERS = 2_000

ScoreTexts = Callable[[Vocabulary, Ids | range, Sequence[str]], list[float]]
"""(vocabulary, the model's row for each id of the vocabulary, texts) -> bits per byte of each text."""


def load_scorer(folder: Path) -> ScoreTexts:
    """A function that scores texts with a checkpoint's model, in float32, as if the model had only some of its rows."""
    model = load_in_float32(folder)

    def score(words: Vocabulary, old_ids: Ids | range, texts: Sequence[str]) -> list[float]:
        rows = torch.as_tensor(old_ids)
        bits = []
        for text in texts:
            ids = torch.tensor(words.tokenizer.encode(text, add_special_tokens=False).ids)
            with torch.inference_mode():
                logits = model(rows[ids][None].to(model.device)).logits[0, :-1].float().cpu()
            nats = torch.nn.functional.cross_entropy(logits[:, rows], ids[1:], reduction="sum").item()
            bits.append(nats / math.log(2) / len(text.encode()))
        return bits

    return score


def measure_sizes(
    folder: Path, corpus: CountedText, sizes: Sequence[int], texts: Mapping[str, Path], scored: int
) -> list[dict[str, Any]]:
    """Measure smaller vocabularies of a checkpoint on the held-out part of a corpus and on other texts.

    Args:
        texts: name -> .txt or .jsonl file.
        scored: number of documents of each text whose bits per byte are measured; 0 for none.

    Returns:
        For each size and text, the figures of `prune_vocab.measure_coverage` and the change of bits per byte.
    """
    words = vocabulary.read_vocabulary(folder / "tokenizer.json")
    held_out: list[str] = []
    counts = vocabulary.count_tokens(words, prune_vocab.counted_documents(corpus, folder, held_out))
    documents = {
        "held out": held_out,
        **{name: list(read_texts(file, folder)) for name, file in texts.items()},
    }
    samples = {name: [text[:SCORED_CHARACTERS] for text in part[:scored]] for name, part in documents.items()}
    score = load_scorer(folder) if scored else None
    rows = range(checkpoint.text_config(checkpoint.read_config(folder))["vocab_size"])
    full_bits = {name: score(words, rows, sample) for name, sample in samples.items()} if score else {}
    measured = []
    for size in sizes:
        kept_ids = prune_vocab.kept_ids(folder, words, counts, size)
        pruned = vocabulary.parse_vocabulary(
            vocabulary.prune_tokenizer(words, kept_ids), "the pruned tokenizer"
        )
        for name, part in documents.items():
            coverage = prune_vocab.measure_coverage(words, pruned, kept_ids, part)
            figures: dict[str, Any] = {"size": len(kept_ids), "text": name, **coverage}
            if score:
                bits = score(pruned, kept_ids, samples[name])
                weights = [len(text.encode()) for text in samples[name]]
                figures["change"] = asdict(intervals.paired_difference(full_bits[name], bits, weights))
            measured.append(figures)
    return measured


def explore_vocabulary(variant: Variant, options: argparse.Namespace) -> tuple[Table, dict[str, Any]]:
    """Measure vocabularies of the sizes that --size names on the texts that the options name."""
    corpus = CountedText(path=options.corpus, documents=options.documents)
    texts = {Path(file).stem: Path(file) for file in options.text}
    measured = measure_sizes(variant.weights, corpus, options.size, texts, options.scored)
    columns: dict[str, Callable[[Mapping[str, Any]], object]] = {
        "tokens kept": lambda row: f"{row['size']:,}",
        "text": lambda row: row["text"],
        "coverage": lambda row: f"{row['coverage']:.4f}",
        "inflation": lambda row: f"{row['inflation']:.4f}",
        "bits/byte, change": lambda row: (
            "{value:+.4f} ± {standard_error:.4f}".format(**row["change"]) if "change" in row else None
        ),
    }
    note = "Coverage: share of the present tokens that are kept. Inflation: tokens after / before."
    title = f"Smaller vocabularies of {variant.name}"
    return Table.from_rows(title, measured, columns, note, text_columns=2), {"sizes": measured}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Coverage and cost of smaller vocabularies of a variant.")
    parser.add_argument("--corpus", type=Path, required=True, help=".txt or .jsonl that ranks the tokens")
    parser.add_argument("--documents", type=int, default=20_000, help="documents of the corpus that are read")
    parser.add_argument("--size", type=int, action="append", required=True, help="tokens to keep; repeat it")
    parser.add_argument("--text", action="append", default=[], help="further .txt or .jsonl; repeat it")
    parser.add_argument(
        "--scored", type=int, default=20, help="documents of a text for bits per byte; 0: none"
    )
    run_exploration("vocab", parser, explore_vocabulary)
