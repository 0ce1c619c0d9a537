"""Count in vLLM how many drafted tokens are accepted at several depths, into results/draft_depth_<variant>.json."""

import argparse
import sys
from pathlib import Path

from _console import console, progress_bar, run, table
from transformers import AutoTokenizer

from slimqwen import checkpoint, variant
from slimqwen.evaluation import acceptance
from slimqwen.evaluation.output import output_to
from slimqwen.recipe.prune_vocab import file_documents
from slimqwen.records import plots, provenance, results


def main() -> int:
    """Parse, count, write the record and its plot, show the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", required=True)
    parser.add_argument("--depths", type=int, nargs="+", default=range(1, 8), help="K (default: 1 to 7)")
    parser.add_argument(
        "--text",
        type=Path,
        help="held-out .txt or .jsonl (default for variants of tiny: the tiny world's prose)",
    )
    parser.add_argument("--tokens", type=int, default=96, help="of a continuation (default: %(default)s)")
    arguments = parser.parse_args()
    one, started = variant.load(arguments.variant), provenance.utc_now()
    if arguments.text is None and "tiny" not in one.lineage:
        parser.error("name held-out text with --text: only variants of tiny have a default")
    file = arguments.text or one.root / "eval" / "tasks" / "tinyworld" / "prose.jsonl"
    checkpoint.check(one.weights, variant.making_command(one.weights, one.root))
    tokenizer = AutoTokenizer.from_pretrained(one.weights)
    texts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in file_documents(file)]
    # As the training record counts: the first third of a text, at most 200 tokens, is gone on with.
    prompts = [ids[: min(max(4, len(ids) // 3), 200)] for ids in texts]
    log = one.root / "logs" / f"draft-depth-{one.name}.log"
    with progress_bar() as progress, output_to(log):
        found = acceptance.sweep(one.weights, prompts, arguments.tokens, arguments.depths, progress)
    record = results.write(
        "draft_depth",
        one,
        found,
        plots.draft_depth,
        command=sys.argv,
        started=started,
        text={"file": provenance.portable(str(file), one.root), "sha256": checkpoint.sha256(file)},
    )
    shown = table(["K"], ("acceptance length", "drafts", "accepted up to each position"))
    for row in found["depths"]:
        rates = " ".join(f"{rate:.3f}" for rate in row["rates"])
        shown.add_row(str(row["depth"]), f"{row['acceptance_length']:.3f}", str(row["drafts"]), rates)
    console.print(shown)
    console.print(
        f"record: {record.relative_to(one.root)}; vLLM's log: {log.relative_to(one.root)}", markup=False
    )
    return 0


if __name__ == "__main__":
    run(main)
