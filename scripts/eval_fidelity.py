"""Compare a variant's next-token distributions with its baseline's: experiments/<variant>/fidelity_<time>.json.

Exits 0 where every figure is within its limit, 1 where one is beyond, 2 where the run cannot tell, 3 for an error
(make makes a 2 of everything but 0).
"""

import argparse
import sys
from pathlib import Path

from _console import EXIT_CODES, console, progress_bar, run

from slimqwen import variant
from slimqwen.evaluation import fidelity
from slimqwen.evaluation.output import output_to
from slimqwen.records import store
from slimqwen.report import tables


def main() -> int:
    """Parse, measure, show, say the verdict."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", required=True)
    parser.add_argument("--plan", help="a file of eval/fidelity/ (default: its config.env's EVALUATION)")
    parser.add_argument(
        "--stages", action="store_true", help="compare the output of every stage of its recipe too"
    )
    parser.add_argument(
        "--records-dir", type=Path, help="write to DIR/<variant>/ instead of experiments/<variant>/"
    )
    arguments = parser.parse_args()
    one = variant.load(arguments.variant)
    log = one.root / "logs" / f"fidelity_{one.name}.log"
    with progress_bar() as progress, output_to(log):
        path = fidelity.measure(
            one,
            arguments.plan or one.evaluation,
            command=sys.argv,
            stages=arguments.stages,
            records_folder=arguments.records_dir and arguments.records_dir / one.name,
            progress=progress,
        )
    for table in tables.fidelity_tables(path):
        console.print(table.as_rich())
    console.print(f"record: {path}; vLLM's log: {log}", soft_wrap=True, markup=False)
    return EXIT_CODES[store.read(path)["verdict"]]


if __name__ == "__main__":
    run(main, refused=3)
