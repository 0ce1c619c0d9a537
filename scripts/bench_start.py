"""Time cold starts of a variant against starts from its baked compile cache, into results/start_up_<variant>.json."""

import argparse
import statistics
import sys

from _console import console, progress_bar, run, table

from slimqwen import variant
from slimqwen.evaluation import start_up
from slimqwen.records import plots, provenance, results
from slimqwen.serving import launch


def main() -> int:
    """Parse, time, write the record and its plot, show the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", required=True)
    parser.add_argument("--rounds", type=int, default=5, help="starts of each kind (default: %(default)s)")
    arguments = parser.parse_args()
    one, started = variant.load(arguments.variant), provenance.utc_now()
    log = one.root / "logs" / f"start-up-{one.name}.log"
    command = launch.resolve(one, port=launch.free_port(), require_baked=True)
    with progress_bar() as progress:
        found = start_up.cold_against_baked(command, arguments.rounds, log, progress)
    record = results.write("start_up", one, found, plots.start_up, command=sys.argv, started=started)
    shown = table(
        ["start"],
        ["until ready (s, median)", "fastest", "slowest", "compiling or loading (s, median)"],
    )
    for kind in ("cold", "baked"):
        ready = [start["ready_seconds"] for start in found[kind]]
        graphs = [sum(graph["seconds"] for graph in start["graphs"]) for start in found[kind]]
        seconds = (statistics.median(ready), min(ready), max(ready), statistics.median(graphs))
        shown.add_row(kind, *(f"{value:.1f}" for value in seconds))
    console.print(shown)
    ratio = found["ready_cold_over_baked"]
    console.print(
        f"cold / baked: {ratio['value']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]; "
        f"record: {record.relative_to(one.root)}; vLLM's log: {log.relative_to(one.root)}",
        markup=False,
    )
    return 0


if __name__ == "__main__":
    run(main)
