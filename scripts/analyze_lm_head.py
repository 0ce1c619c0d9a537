"""Say what smaller output heads would cost a variant, and write a record lm_head and its plot into results/."""

import argparse
import sys
from itertools import islice
from pathlib import Path

from _console import console, progress_bar, run, table

from slimqwen import checkpoint, variant
from slimqwen.evaluation import lm_head
from slimqwen.recipe import prune_vocab
from slimqwen.records import provenance, results
from slimqwen.report import plots

CHARACTERS = 8_192
"""Of a document that are scored."""


def main() -> int:
    """Parse, measure, write the record and its plot, show the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", required=True)
    parser.add_argument(
        "--text",
        type=Path,
        help="held-out .txt or .jsonl to score (default for variants of tiny: the tiny world's prose)",
    )
    parser.add_argument(
        "--documents", type=int, default=60, help="of it, each cut to 8,192 characters (default: %(default)s)"
    )
    parser.add_argument(
        "--fractions",
        type=float,
        nargs="+",
        default=lm_head.FRACTIONS,
        help="of hidden: ranks to measure (default: %(default)s)",
    )
    arguments = parser.parse_args()
    one, started = variant.load(arguments.variant), provenance.utc_now()
    if arguments.text is None and "tiny" not in one.lineage:
        parser.error("name held-out text with --text: only variants of tiny have a default")
    if not all(0 < share <= 1 for share in arguments.fractions):
        parser.error("--fractions lie above 0 and at most at 1")
    file = arguments.text or one.root / "eval" / "tasks" / "tinyworld" / "prose.jsonl"
    checkpoint.check(one.weights, variant.making_command(one.weights, one.root))
    documents = islice(prune_vocab.file_documents(file), arguments.documents)
    texts = [text[:CHARACTERS] for text in documents if text.strip()]
    with progress_bar() as progress:
        found = lm_head.analyse(one.weights, texts, arguments.fractions, progress)
    text = {"file": provenance.portable(str(file), one.root), "sha256": checkpoint.sha256(file)}
    record = results.write("lm_head", one, found, command=sys.argv, started=started, text=text)
    plots.beside(record)
    shown = table(["head"], ("energy", "error", "MB", "of 16 bit", "bits/byte", "change", "SE"))
    whole = found["head"]["bytes"]
    shown.add_row("16 bit", "1", "0", f"{whole / 1e6:.2f}", "1", f"{found['bits_per_byte']['value']:.4f}")
    for row in found["heads"]:
        low_rank = row["kind"] == "low_rank"
        shown.add_row(
            f"rank {row['rank']}" if low_rank else f"{row['bits']} bit, groups of {row['group']}",
            f"{row['energy']:.4f}" if low_rank else "",
            f"{row['relative_error']:.4f}",
            f"{row['bytes'] / 1e6:.2f}",
            f"{row['bytes_share']:.3f}",
            f"{row['bits_per_byte']['value']:.4f}",
            f"{row['bits_per_byte_change']['value']:+.4f}",
            f"{row['bits_per_byte_change']['standard_error']:.4f}",
        )
    console.print(shown)
    ranks = ", ".join(f"{float(energy):.0%} at rank {rank}" for energy, rank in found["ranks"].items())
    console.print(f"energy: {ranks} of {found['head']['hidden']}", markup=False)
    for group in found["groups_left_out"]:
        console.print(f"groups of {group} left out: they do not divide {found['head']['hidden']}")
    console.print(
        f"record: {record.relative_to(one.root)}, plot: {record.with_suffix('.svg').relative_to(one.root)}",
        markup=False,
        soft_wrap=True,
    )
    return 0


if __name__ == "__main__":
    run(main)
