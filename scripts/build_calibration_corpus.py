"""Mix a calibration text from files, chats, data sets and the tiny world, and write it with its manifest."""

import argparse
from pathlib import Path

from _console import console, progress_bar, run, table

from slimqwen import checkpoint, variant
from slimqwen.recipe import calibration_corpus


def main() -> int:
    """Parse, build, show what came from where."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--variant", required=True, help="whose tokenizer counts and whose chat template renders"
    )
    parser.add_argument(
        "--source",
        required=True,
        action="append",
        metavar="NAME=FILE[:WEIGHT]",
        help="a .txt or .jsonl file or a folder of parquet or .jsonl files; or tinyworld[:WEIGHT]",
    )
    parser.add_argument("--tokens", required=True, type=int, help="of all sources together")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the order of documents (default: %(default)s)"
    )
    parser.add_argument("--output", required=True, type=Path, metavar="FILE.jsonl")
    arguments = parser.parse_args()
    one = variant.load(arguments.variant)
    checkpoint.check(one.weights, variant.making_command(one.weights, one.root))
    sources = [calibration_corpus.parse_source(given) for given in arguments.source]
    with progress_bar() as progress:
        manifest = calibration_corpus.build(
            one.weights, sources, arguments.tokens, arguments.seed, arguments.output, progress
        )
    shown = table(["source"], ("weight", "documents", "duplicates", "near", "taken", "tokens"))
    for row in manifest["sources"]:
        documents = "endless" if row["documents"] is None else str(row["documents"])
        counts = (row[key] for key in ("duplicates", "near_duplicates", "taken", "tokens"))
        shown.add_row(row["name"], f"{row['weight']:g}", documents, *map(str, counts))
    console.print(shown)
    for row in manifest["sources"]:
        if row["ran_out"]:
            console.print(
                f"{row['name']} ran out; the other sources fill its share", markup=False, soft_wrap=True
            )
    if manifest["tokens"] < manifest["tokens_wanted"]:
        console.print(
            f"all sources ran out at {manifest['tokens']} of {manifest['tokens_wanted']} tokens",
            soft_wrap=True,
        )
    account = calibration_corpus.manifest_path(arguments.output)
    console.print(f"text: {arguments.output}, manifest: {account}", markup=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    run(main)
