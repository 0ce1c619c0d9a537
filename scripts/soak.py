"""Load a variant's server for minutes, and say whether its memory stays flat: a record soak of results/.

Exits 0 where it does, 1 where something is wrong, 2 where the run was too short to tell, 3 for an error (make makes a 2
of everything but 0).
"""

import argparse
import sys

from _console import EXIT_CODES, console, progress_bar, run

from slimqwen import variant
from slimqwen.evaluation import soak
from slimqwen.records import provenance, results
from slimqwen.report import tables
from slimqwen.serving import launch


def main() -> int:
    """Parse, soak, write the record, show the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", required=True)
    parser.add_argument("--minutes", type=float, default=15, help="of load (default: %(default)s)")
    arguments = parser.parse_args()
    one, started = variant.load(arguments.variant), provenance.utc_now()
    log = one.root / "logs" / f"soak-{one.name}.log"
    with progress_bar() as progress:
        found = soak.run(one, 60 * arguments.minutes, log, progress)
    engine = provenance.of_server(launch.resolve(one))
    record = results.write("soak", one, found, command=sys.argv, started=started, **engine)
    console.print(tables.soak_table(one.root, one.name).as_rich())
    console.print(
        f"record: {record.relative_to(one.root)}; vLLM's log: {log.relative_to(one.root)}", markup=False
    )
    return EXIT_CODES[found["verdict"]]


if __name__ == "__main__":
    run(main, refused=3)
