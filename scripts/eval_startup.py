"""Time a variant's starts phase by phase, cold, warm and baked, into a record start_up of results/."""

import argparse
import sys

from _console import console, progress_bar, run

from slimqwen import variant
from slimqwen.evaluation import start_up
from slimqwen.records import provenance, results
from slimqwen.report import plots, tables
from slimqwen.serving import launch


def main() -> int:
    """Parse, time, write the record and its plot, show the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", required=True)
    parser.add_argument(
        "--rounds",
        type=int,
        default=6,
        help="starts of each kind, 6 for a 95 %% interval (default: %(default)s)",
    )
    arguments = parser.parse_args()
    one, started = variant.load(arguments.variant), provenance.utc_now()
    log = one.root / "logs" / f"start-up-{one.name}.log"
    with progress_bar() as progress:
        found = start_up.ledger(one, arguments.rounds, log, progress)
    engine = provenance.of_server(launch.resolve(one))
    record = results.write("start_up", one, found, command=sys.argv, started=started, **engine)
    plots.beside(record)
    console.print(tables.start_up_table(one.root, one.name).as_rich())
    console.print(
        f"record: {record.relative_to(one.root)}; vLLM's log: {log.relative_to(one.root)}", markup=False
    )
    return 0


if __name__ == "__main__":
    run(main)
