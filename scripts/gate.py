"""Gate a variant by fidelity, acceptance, quality and engine modes: experiments/<variant>/gate_<time>.json.

Exits 0 where everything passes, 1 where something fails, 2 where the runs cannot tell, 3 for an error; make turns all
but 0 into 2, so ask this script where the difference matters.
"""

import argparse
import sys

from _console import EXIT_CODES, console, progress_bar, run

from slimqwen import variant
from slimqwen.evaluation import gate
from slimqwen.evaluation.output import output_to
from slimqwen.records import store
from slimqwen.report import tables


def main() -> int:
    """Parse, gate, show one page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", required=True)
    parser.add_argument("--plan", help="a file of eval/gates/ (default: its config.env's EVALUATION)")
    arguments = parser.parse_args()
    one = variant.load(arguments.variant)
    log = one.root / "logs" / f"gate_{one.name}.log"
    with progress_bar() as progress, output_to(log):
        path = gate.run(one, arguments.plan or one.evaluation, command=sys.argv, progress=progress)
    console.print(tables.gate_table(path).as_rich())
    console.print(f"record: {path}; log: {log}", soft_wrap=True, markup=False)
    return EXIT_CODES[store.read(path)["verdict"]]


if __name__ == "__main__":
    run(main, refused=3)
