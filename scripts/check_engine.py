"""Hold a variant's tokens in each combination of engine modes against the plain engine's.

Writes experiments/<variant>/engine_<time>.json and eval/unsafe_engines.json. Exits 0 where nothing is wrong, 1 where a
combination is unsafe, 3 for an error (make makes a 2 of everything but 0).
"""

import argparse
import sys

from _console import console, progress_bar, run, table

from slimqwen import variant
from slimqwen.evaluation import engine_matrix
from slimqwen.evaluation.engine_matrix import State
from slimqwen.evaluation.output import output_to
from slimqwen.records import store


def main() -> int:
    """Parse, try every combination, show what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", required=True)
    parser.add_argument("--plan", default="tinyworld", help="a file of eval/engine/ (default: %(default)s)")
    arguments = parser.parse_args()
    one = variant.load(arguments.variant)
    log = one.root / "logs" / f"engine_{one.name}.log"
    with progress_bar() as progress, output_to(log):
        path = engine_matrix.measure(one, arguments.plan, command=sys.argv, progress=progress)
    record = store.read(path)
    shown = table(
        ("", "MTP K", "prefix", "KV", "prefill", "at a time", "graphs", "verdict"),
        ("items", "near ties", "prefix hits", "preempted", "s"),
    )
    shown.add_column("why")
    reasons: dict[str, int] = {}
    for row in record["cells"]:
        modes, preempted = row["modes"], row["preemptions"]
        why = [reasons.setdefault(each, len(reasons) + 1) for each in (row["reason"], *row["notes"]) if each]
        shown.add_row(
            "*" if row["served"] else "",
            str(modes["draft_tokens"] or "off"),
            "on" if modes["prefix_caching"] else "off",
            modes["kv_cache_dtype"],
            "chunked" if modes["chunked_prefill"] else "whole",
            str(modes["concurrency"]),
            modes["graphs"],
            row["state"],
            *map(str, (row["items"], row["near_ties"], row["prefix_hits"])),
            "-" if preempted is None else str(preempted),
            f"{row['seconds']:.0f}",
            ", ".join(map(str, why)),
        )
    console.print(shown)
    for reason, number in reasons.items():
        console.print(f"{number}: {reason}", soft_wrap=True, markup=False)
    unsafe = sum(row["state"] == State.UNSAFE for row in record["cells"])
    near_ties = sum(row["near_ties"] for row in record["cells"])
    console.print(
        f"* as {one.name} is served: {engine_matrix.verdict(record)}. Of {len(record['cells'])} combinations {unsafe} "
        f"are unsafe; {near_ties} near ties below {record['near_tie_nats']} nats.\n"
        f"record: {path}; vLLM's log: {log}",
        soft_wrap=True,
        markup=False,
    )
    return 1 if unsafe else 0


if __name__ == "__main__":
    run(main, refused=3)
