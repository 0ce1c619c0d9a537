"""Gate copies of a variant whose worth is known: one that is the same, one of each damage; into results/.

Exits 0 where every damaged copy fails and the one that is the same does not, else 1.
"""

import argparse
import sys

from _console import console, progress_bar, run, table

from slimqwen import variant
from slimqwen.evaluation import gate_trial
from slimqwen.evaluation.output import output_to
from slimqwen.evaluation.verdict import Verdict
from slimqwen.records import provenance, results
from slimqwen.report import plots


def main() -> int:
    """Parse, gate, write the record, show."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", required=True, help="a quantised one with an MTP head")
    parser.add_argument("--plan", help="a file of eval/gates/ (default: its config.env's EVALUATION)")
    arguments = parser.parse_args()
    one, started = variant.load(arguments.variant), provenance.utc_now()
    log = one.root / "logs" / f"gate-trial-{one.name}.log"
    with progress_bar() as progress, output_to(log):
        found = gate_trial.run(one, arguments.plan or one.evaluation, command=sys.argv, progress=progress)
    record = results.write("gate_trial", one, found, command=sys.argv, started=started)
    plots.beside(record)
    gates = list(found["trials"][0]["verdicts"])
    shown = table(["copy", *gates, "gate"], [])
    for row in found["trials"]:
        shown.add_row(row["damage"] or "the same", *(row["verdicts"][gate] for gate in gates), row["verdict"])
    console.print(shown)
    console.print(
        f"record: {record.relative_to(one.root)}; vLLM's log: {log.relative_to(one.root)}", markup=False
    )
    fails = [row["verdict"] == Verdict.FAIL for row in found["trials"]]
    return 0 if fails == [row["damage"] is not None for row in found["trials"]] else 1


if __name__ == "__main__":
    run(main)
