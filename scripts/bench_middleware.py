"""Time a variant's server in turns with the same one under bare vLLM, into a record middleware of results/."""

import argparse
import sys

from _console import console, progress_bar, run, table

from slimqwen import variant
from slimqwen.evaluation import middleware
from slimqwen.records import provenance, results
from slimqwen.report import plots


def main() -> int:
    """Parse, time, write the record and its plot, show the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", required=True)
    parser.add_argument("--rounds", type=int, default=6, help="starts of both servers (default: %(default)s)")
    parser.add_argument(
        "--pairs", type=int, default=50, help="questions to each server a round (default: %(default)s)"
    )
    arguments = parser.parse_args()
    one, started = variant.load(arguments.variant), provenance.utc_now()
    with progress_bar() as progress:
        found = middleware.cost(one, arguments.rounds, arguments.pairs, one.root / "logs", progress)
    record = results.write("middleware", one, found, command=sys.argv, started=started)
    plots.beside(record)
    shown = table(("median of a round",), ("with / without", "95 % interval"))
    for measure in ("ttft", "tpot"):
        ratio = found[f"{measure}_ms_with_over_without"]
        shown.add_row(measure.upper(), f"{ratio['value']:.4f}", f"{ratio['low']:.4f} to {ratio['high']:.4f}")
    console.print(shown)
    console.print(f"record: {record.relative_to(one.root)}", markup=False)
    return 0


if __name__ == "__main__":
    run(main)
