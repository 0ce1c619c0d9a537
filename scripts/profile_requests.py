"""See where a request's time goes, per prompt class: a record in results/, its plot, and traces in logs/."""

import argparse
import sys

from _console import console, progress_bar, run, table

from slimqwen import variant
from slimqwen.evaluation import profile, workload
from slimqwen.evaluation.output import output_to
from slimqwen.records import provenance, results
from slimqwen.report import plots
from slimqwen.serving import launch


def main() -> int:
    """Parse, profile, write the record and its plot, show."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", required=True)
    parser.add_argument(
        "--workload", default="classes", help="a file of eval/workloads/ (default: %(default)s)"
    )
    parser.add_argument("--requests", type=int, default=8, help="timed, a class (default: %(default)s)")
    arguments = parser.parse_args()
    one, started = variant.load(arguments.variant), provenance.utc_now()
    traces = one.root / "logs" / f"profile-{one.name}"
    log = traces.with_name(f"{traces.name}.log")
    with progress_bar() as progress, output_to(log):
        asked = workload.load(arguments.workload, one.root)
        found = profile.profile(one, asked, arguments.requests, traces, progress)
    engine = provenance.of_server(launch.resolve(one))
    record = results.write("profile", one, found, command=sys.argv, started=started, **engine)
    plots.beside(record)
    phases = table(
        ["class, tokens"], [*(f"{phase}, ms" for phase in profile.PHASES), "decode", "a step's parts"]
    )
    operators = table(["class", "operator"], ["calls", "own time, ms", "share"])
    for row in found["classes"]:
        parts = ", ".join(f"{part} {share:.0%}" for part, share in row["step"].items() if share >= 0.01)
        milliseconds = (f"{row['seconds'][phase]['value'] * 1e3:,.1f}" for phase in profile.PHASES)
        lengths = f"{row['class']} {row['prompt_tokens']} -> {row['output_tokens']}"
        phases.add_row(lengths, *milliseconds, f"{row['decode_share']:.0%}", parts)
        for each in row["operators"][:5]:
            figures = (str(each["calls"]), f"{each['milliseconds']:,.1f}", f"{each['share']:.1%}")
            operators.add_row(row["class"], each["name"], *figures)
    console.print(phases)
    console.print(operators)
    console.print(
        f"record: {record.relative_to(one.root)}; traces: {traces.relative_to(one.root)}/; vLLM's log: "
        f"{log.relative_to(one.root)}",
        markup=False,
    )
    return 0


if __name__ == "__main__":
    run(main)
