"""Time a server's first requests against its next, warmed up and bare, into a record first_request of results/."""

import argparse
import sys

from _console import console, progress_bar, run

from slimqwen import variant
from slimqwen.evaluation import first_request
from slimqwen.records import provenance, results
from slimqwen.report import plots, tables
from slimqwen.serving import launch


def main() -> int:
    """Parse, time, write the record and its plot, show the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", required=True)
    parser.add_argument(
        "--rounds", type=int, default=6, help="starts of each server, 2 or more (default: %(default)s)"
    )
    arguments = parser.parse_args()
    one, started = variant.load(arguments.variant), provenance.utc_now()
    with progress_bar() as progress:
        found = first_request.measure(one, arguments.rounds, one.root / "logs", progress)
    engine = provenance.of_server(launch.resolve(one))
    record = results.write("first_request", one, found, command=sys.argv, started=started, **engine)
    plots.beside(record)
    console.print(tables.first_request_table(one.root, one.name).as_rich())
    console.print(f"record: {record.relative_to(one.root)}", markup=False)
    return 0


if __name__ == "__main__":
    run(main)
