"""Cost of smaller vocabularies: share of tokens kept, tokens per byte and bits per byte, by source of text.

A pruned model is the original one whose input ids are mapped back and whose logits are cut to the kept rows, so the
original, run once per size on the new tokens, gives the pruned model's bits per byte.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import Field

from slimqwen import checkpoint
from slimqwen.analysis.float32_model import load_model
from slimqwen.models import vocabulary
from slimqwen.models.vocabulary import Ids, Vocabulary
from slimqwen.progress import Progress, silent
from slimqwen.recipe.stages import prune_vocab
from slimqwen.records import provenance, store
from slimqwen.records.panel import Line, Panel
from slimqwen.records.record import Block, Difference, Estimate, NonNegative, Positive, Record, Share
from slimqwen.records.table import Table
from slimqwen.stats import intervals
from slimqwen.text.corpus import file_texts
from slimqwen.variant import Variant

_SCORED_CHARACTERS = 2_000


class Source(Block):
    """A source of text under the present vocabulary."""

    documents: Positive
    bytes: Positive
    tokens_per_byte: NonNegative
    bits_per_byte: Estimate | None = Field(None, description="null if no document was scored")


class SourceCoverage(Block):
    """A source of text under a smaller vocabulary."""

    coverage: Share = Field(description="share of the old tokens that are kept")
    tokens_per_byte: NonNegative
    inflation: NonNegative = Field(description="tokens after pruning / tokens before")
    bits_per_byte: Estimate | None = Field(None, description="null if no document was scored")
    bits_per_byte_change: Difference | None = Field(None, description="paired by document")


class Size(Block):
    """One smaller vocabulary."""

    size: Positive = Field(description="tokens kept")
    sources: dict[str, SourceCoverage] = Field(min_length=1)


class VocabCoverage(Record):
    """Cost of smaller vocabularies of a variant, by source of text."""

    kind = "vocab_coverage"
    verb = "analyze vocab"

    tokens: Positive = Field(description="size of the present vocabulary")
    sources: dict[str, Source] = Field(min_length=1)
    sizes: tuple[Size, ...] = Field(min_length=1)

    def tables(self, path: Path) -> list[Table]:
        """One row per size and source."""
        columns: dict[str, Callable[[tuple[Size, str, SourceCoverage]], object]] = {
            "tokens kept": lambda row: f"{row[0].size:,}",
            "source": lambda row: row[1],
            "coverage": lambda row: f"{row[2].coverage:.4f}",
            "tokens/byte": lambda row: f"{row[2].tokens_per_byte:.4f}",
            "inflation": lambda row: f"{row[2].inflation:.4f}",
            "bits/byte": lambda row: row[2].bits_per_byte and f"{row[2].bits_per_byte.value:.4f}",
            "change": lambda row: row[2].bits_per_byte_change and f"{row[2].bits_per_byte_change.value:+.4f}",
        }
        rows = [(size, name, source) for size in self.sizes for name, source in size.sources.items()]
        note = "Coverage: share of the old tokens that are kept. Inflation: tokens after / before."
        return [
            Table.from_rows(f"Smaller vocabularies of {self.variant}", rows, columns, note, text_columns=2)
        ]

    def panels(self) -> list[Panel]:
        """Coverage, inflation and change of bits per byte by size, one line per source."""
        sizes = sorted(self.sizes, key=lambda size: size.size)
        x = [size.size for size in sizes]
        coverage, inflation = (
            [Line(name, x, [getattr(size.sources[name], field) for size in sizes]) for name in self.sources]
            for field in ("coverage", "inflation")
        )
        changes = []
        for name in self.sources:
            scored = [(size.size, size.sources[name].bits_per_byte_change) for size in sizes]
            points = [(size, change) for size, change in scored if change]
            if points:
                changes.append(
                    Line(
                        name,
                        [size for size, _ in points],
                        [change.value for _, change in points],
                        [change.standard_error for _, change in points],
                    )
                )
        panels = [
            Panel("tokens kept", "share of old tokens kept", coverage),
            Panel("tokens kept", "tokens per byte, after / before", inflation),
        ]
        if changes:
            panels.append(Panel("tokens kept", "change of bits per byte (bars: 1 SE)", changes))
        return panels


def write(
    variant: Variant,
    sizes: Sequence[int],
    *,
    corpus: Path | None,
    num_documents: int,
    texts: Mapping[str, Path],
    num_held_out: int,
    num_scored: int,
    command: Sequence[str],
    progress: Progress = silent,
) -> Path:
    """Measure smaller vocabularies of a variant and write the record.

    Args:
        sizes: tokens to keep.
        corpus: .txt or .jsonl file that ranks the tokens; None is the tiny world.
        num_documents: documents of the corpus.
        texts: files to measure on by source name, beside the tiny world's held-out documents.
        num_held_out: held-out documents of each kind of the tiny world.
        num_scored: documents per source that bits per byte are measured on; 0 for none.

    Raises:
        CorpusError: a text is missing or malformed.
    """
    started = provenance.utc_now()
    variant.require_weights()
    ranking = prune_vocab.Corpus(
        source="file" if corpus else "tinyworld", path=corpus, documents=num_documents
    )
    digests = prune_vocab.data(prune_vocab.PruneVocabParameters(size=sizes[0], corpus=ranking))
    seeds = {"corpus": ranking.seed, "held_out": ranking.seed + 1}
    sources = world_texts(num_held_out, seeds["held_out"])
    for name, file in texts.items():
        sources[name] = list(file_texts(file))
    fields = measure(variant.weights, ranking, sizes, sources, num_scored, progress)
    block = provenance.of_variant(
        variant,
        command,
        started,
        corpus={**ranking.model_dump(mode="json"), "digests": digests},
        seeds=seeds,
    )
    return store.write(
        variant.root / "results", VocabCoverage(variant=variant.name, provenance=block, **fields)
    )


def world_texts(num_documents: int, seed: int) -> dict[str, list[str]]:
    """New documents of every kind of the tiny world, by kind."""
    from slimqwen.tinyworld.documents import LONG_MIX, DocumentSampler
    from slimqwen.tinyworld.world import World

    world = World()
    return {
        kind: [
            document.text
            for document in islice(DocumentSampler(world, (), {kind: 1.0}).stream(seed), num_documents)
        ]
        for kind in LONG_MIX
    }


def measure(
    source: Path,
    corpus: prune_vocab.Corpus,
    sizes: Sequence[int],
    texts: Mapping[str, Sequence[str]],
    num_scored: int,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Cost of pruning a checkpoint to several sizes, without writing a checkpoint.

    Args:
        corpus: text that decides which tokens stay.
        sizes: as `PruneVocabParameters.size`.
        texts: texts to measure on, by source.
        num_scored: texts per source that the model scores, each cut to 2,000 characters; 0 for none.
    """
    words = vocabulary.read(source / "tokenizer.json")
    counts = vocabulary.count(words, prune_vocab.documents(corpus))
    old_counts = {name: vocabulary.count(words, documents) for name, documents in texts.items()}
    samples = {
        name: [text[:_SCORED_CHARACTERS] for text in documents[:num_scored]]
        for name, documents in texts.items()
    }
    weights = {name: [len(text.encode()) for text in documents] for name, documents in samples.items()}
    score = _scorer(source) if num_scored else None
    rows = checkpoint.text_config(checkpoint.read_config(source))["vocab_size"]
    old_bits = {name: score(words, range(rows), sample) for name, sample in samples.items()} if score else {}
    sources: dict[str, dict[str, Any]] = {}
    for name, documents in texts.items():
        length = sum(len(text.encode()) for text in documents)
        sources[name] = {
            "documents": len(documents),
            "bytes": length,
            "tokens_per_byte": int(old_counts[name].sum()) / length,
        }
        if score:
            sources[name]["bits_per_byte"] = asdict(intervals.mean(old_bits[name], weights[name]))
    by_size = []
    for done, size in enumerate(sizes):
        progress("measure the sizes", done, len(sizes))
        kept_ids = prune_vocab.kept_ids(source, words, counts, size)
        pruned = vocabulary.parse(vocabulary.prune(words, kept_ids), f"{source / 'tokenizer.json'}, pruned")
        by_source: dict[str, dict[str, Any]] = {}
        for name, documents in texts.items():
            tokens, old = int(vocabulary.count(pruned, documents).sum()), old_counts[name]
            by_source[name] = {
                "coverage": int(old[kept_ids].sum()) / int(old.sum()),
                "tokens_per_byte": tokens / sources[name]["bytes"],
                "inflation": tokens / int(old.sum()),
            }
            if score:
                bits = score(pruned, kept_ids, samples[name])
                change = intervals.paired_difference(old_bits[name], bits, weights[name])
                by_source[name]["bits_per_byte"] = asdict(intervals.mean(bits, weights[name]))
                by_source[name]["bits_per_byte_change"] = asdict(change)
        by_size.append({"size": len(kept_ids), "sources": by_source})
    return {"tokens": len(words.ids), "sources": sources, "sizes": by_size}


def _scorer(source: Path) -> Callable[[Vocabulary, Ids | range, Sequence[str]], list[float]]:
    """A function (vocabulary, its ids in the model, texts) -> bits per byte of each text, in float32."""
    import torch

    model, end_of_text = load_model(source)

    def score(words: Vocabulary, old_ids: Ids | range, texts: Sequence[str]) -> list[float]:
        rows = torch.as_tensor(old_ids)
        bits = []
        for text in texts:
            ids = torch.tensor(words.tokenizer.encode(text, add_special_tokens=False).ids)
            inputs = torch.cat([torch.tensor([end_of_text]), rows[ids]])[None, :-1]
            with torch.inference_mode():
                logits = model(inputs).logits[0][:, rows]
            nats = torch.nn.functional.cross_entropy(logits, ids, reduction="sum").item()
            bits.append(nats / math.log(2) / len(text.encode()))
        return bits

    return score
