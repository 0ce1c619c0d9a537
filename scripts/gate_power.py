"""Damage a variant's checkpoint many times and see whether the gates notice: a record gate_power in results/.

Exits 0 where the responsible gate failed every damaged copy and false alarms are as rare as stated, else 1.
"""

import argparse
import sys

from _console import console, progress_bar, run, table

from slimqwen import variant
from slimqwen.evaluation import gate_power
from slimqwen.evaluation.output import output_to
from slimqwen.evaluation.verdict import Verdict
from slimqwen.records import provenance, results
from slimqwen.report import plots


def main() -> int:
    """Parse, damage, write the record and its plot, show."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", required=True, help="a quantised one with an MTP head")
    parser.add_argument("--plan", help="a file of eval/gates/ (default: its config.env's EVALUATION)")
    parser.add_argument("--seeds", type=int, default=20, help="of each damage (default: %(default)s)")
    parser.add_argument(
        "--again", help="a variant of the baseline's weights in other batches, scored on the same items"
    )
    arguments = parser.parse_args()
    one, started = variant.load(arguments.variant), provenance.utc_now()
    again = variant.load(arguments.again) if arguments.again else None
    log = one.root / "logs" / f"gate-power-{one.name}.log"
    with progress_bar() as progress, output_to(log):
        found = gate_power.examine(
            one, arguments.plan or one.evaluation, range(arguments.seeds), again, progress
        )
    record = results.write("gate_power", one, found, command=sys.argv, started=started)
    plots.beside(record)
    shown = table(["damage", "gate"], ["caught", "of", "smallest", "largest", "undamaged"])
    for row in found["damages"]:
        values = [each["value"] for each in row["rows"]]
        whole = found["undamaged"][row["gate"]]["value"]
        figures = (f"{value:.5f}" for value in (min(values), max(values), whole))
        shown.add_row(row["damage"], row["gate"], str(row["caught"]), str(row["of"]), *figures)
    console.print(shown)
    alarms = table(["false alarms of"], ["failed", "inconclusive", "of", "rate", "stated at most"])
    for row in found["false_alarms"]:
        counts = (str(row[name]) for name in ("failed", "inconclusive", "replicates"))
        alarms.add_row(row["gate"], *counts, f"{row['rate']:.3f}", f"{row['stated']:.2f}")
    console.print(alarms)
    console.print(
        f"record: {record.relative_to(one.root)}; vLLM's log: {log.relative_to(one.root)}", markup=False
    )
    every = all(row["caught"] == row["of"] for row in found["damages"])
    rare = all(row["verdict"] == Verdict.PASS for row in found["false_alarms"])
    return 0 if every and rare else 1


if __name__ == "__main__":
    run(main)
