"""Say what smaller vocabularies would cost a variant, and write a record vocab_coverage and its plot into results/."""

import argparse
import sys
from itertools import islice
from pathlib import Path

from _console import console, progress_bar, run, table

from slimqwen import checkpoint, variant
from slimqwen.recipe import prune_vocab
from slimqwen.records import provenance, results
from slimqwen.report import plots
from slimqwen.tinyworld.documents import LONG_MIX, DocumentSampler
from slimqwen.tinyworld.world import World


def main() -> int:
    """Parse, measure, write the record, show its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", required=True)
    parser.add_argument("--sizes", required=True, nargs="+", type=int)
    parser.add_argument("--corpus", type=Path, help="text to rank tokens by (default: the tiny world's)")
    parser.add_argument("--documents", type=int, default=20_000, help="of it (default: %(default)s)")
    parser.add_argument(
        "--text", action="append", default=[], metavar="NAME=FILE", help="measure on this in addition"
    )
    parser.add_argument(
        "--held-out",
        type=int,
        default=200,
        help="documents of each kind of the tiny world (default: %(default)s)",
    )
    parser.add_argument(
        "--scored",
        type=int,
        default=20,
        help="documents a source for bits per byte, 0: none (default: %(default)s)",
    )
    arguments = parser.parse_args()
    one, started = variant.load(arguments.variant), provenance.utc_now()
    checkpoint.check(one.weights, variant.making_command(one.weights, one.root))
    corpus = prune_vocab.Corpus(
        source="file" if arguments.corpus else "tinyworld",
        path=arguments.corpus,
        documents=arguments.documents,
    )
    digests = prune_vocab.data(prune_vocab.PruneVocabParameters(size=arguments.sizes[0], corpus=corpus))
    seeds = {"corpus": corpus.seed, "held_out": corpus.seed + 1}
    texts = world_texts(arguments.held_out, seeds["held_out"]) | dict(map(file_texts, arguments.text))
    with progress_bar() as progress:
        found = prune_vocab.coverage(one.weights, corpus, arguments.sizes, texts, arguments.scored, progress)
    record = results.write(
        "vocab_coverage",
        one,
        found,
        command=sys.argv,
        started=started,
        corpus={**corpus.model_dump(mode="json"), "digests": digests},
        seeds=seeds,
    )
    plots.beside(record)
    shown = table(["size", "source"], ("coverage", "tokens/byte", "inflation", "bits/byte", "change"))
    for row in found["sizes"]:
        for name, of in row["sources"].items():
            bits = [of[key]["value"] for key in ("bits_per_byte", "bits_per_byte_change") if key in of]
            shown.add_row(
                str(row["size"]),
                name,
                f"{of['coverage']:.4f}",
                f"{of['tokens_per_byte']:.4f}",
                f"{of['inflation']:.4f}",
                *(f"{value:.4f}" for value in bits),
            )
    console.print(shown)
    console.print(
        f"record: {record.relative_to(one.root)}, plot: {record.with_suffix('.svg').relative_to(one.root)}",
        markup=False,
        soft_wrap=True,
    )
    return 0


def world_texts(documents: int, seed: int) -> dict[str, list[str]]:
    """New documents of every kind that the tiny world has."""
    world = World()
    streams = {kind: DocumentSampler(world, (), {kind: 1.0}).stream(seed) for kind in LONG_MIX}
    return {
        kind: [document.text for document in islice(stream, documents)] for kind, stream in streams.items()
    }


def file_texts(given: str) -> tuple[str, list[str]]:
    """NAME=FILE -> the name and the file's documents."""
    name, _, file = given.partition("=")
    return name, list(prune_vocab.file_documents(Path(file)))


if __name__ == "__main__":
    run(main)
