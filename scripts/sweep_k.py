"""Count in vLLM how long drafts are accepted at several depths K: experiments/<variant>/acceptance_<time>.json."""

import argparse
import sys
from pathlib import Path

from _console import console, progress_bar, run

from slimqwen import variant
from slimqwen.evaluation import acceptance
from slimqwen.evaluation.output import output_to
from slimqwen.records import store
from slimqwen.report import plots, tables
from slimqwen.serving import launch


def main() -> int:
    """Parse, count, write the record and a plot, show."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", required=True)
    parser.add_argument(
        "--plan", default="tinyworld", help="a file of eval/acceptance/ (default: %(default)s)"
    )
    parser.add_argument("--depths", type=int, nargs="+", default=range(8), help="K (default: 0 to 7)")
    parser.add_argument("--greedy", action="store_true", help="leave out the plan's temperatures above 0")
    parser.add_argument(
        "--records-dir", type=Path, help="write to DIR/<variant>/ instead of experiments/<variant>/"
    )
    arguments = parser.parse_args()
    one = variant.load(arguments.variant)
    log = one.root / "logs" / f"sweep-k-{one.name}.log"
    with progress_bar() as progress, output_to(log):
        path = acceptance.measure(
            one,
            arguments.plan,
            sorted(set(arguments.depths)),
            command=sys.argv,
            greedy_only=arguments.greedy,
            records_folder=arguments.records_dir and arguments.records_dir / one.name,
            progress=progress,
        )
    for table in tables.acceptance_tables(path):
        console.print(table.as_rich())
    record = store.read(path)
    if record["choice"]:
        plots.beside(path)
        depth, flags = record["choice"]["depth"], launch.resolve(one, platform="cuda").flags
        sizes = acceptance.graph_sizes(depth, int(flags.get("max-num-seqs") or 1))
        console.print(
            f"CUDA graphs for K = {depth}: a step reads K + 1 tokens of each sequence, so VLLM_CUDAGRAPH_CAPTURE_SIZES="
            f"{','.join(map(str, sizes))} (config.env: {flags.get('cudagraph-capture-sizes', 'not set')})",
            markup=False,
            soft_wrap=True,
        )
    console.print(f"record: {path}; vLLM's log: {log}", soft_wrap=True, markup=False)
    return 0


if __name__ == "__main__":
    run(main)
