"""Time variants over a workload, in turns, and write experiments/<variant>/latency_<time>.json for each."""

import argparse
import sys
from pathlib import Path

import _console

from slimqwen import variant
from slimqwen.evaluation import latency, workload
from slimqwen.report import tables


def main() -> int:
    """Parse, measure, show."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--variant", required=True, nargs="+", help="several take turns on fresh servers: A B A B"
    )
    parser.add_argument(
        "--baseline", action="store_true", help="the variant's baseline takes turns with it, and goes first"
    )
    parser.add_argument(
        "--workload", default="classes", help="a file of eval/workloads/ (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, help="instead of the workload's")
    parser.add_argument(
        "--records-dir", type=Path, help="write to DIR/<variant>/ instead of experiments/<variant>/"
    )
    parser.add_argument("--port", type=int, help="of the servers, running or to be started")
    arguments = parser.parse_args()

    chosen = [variant.load(name) for name in arguments.variant]
    if arguments.baseline:
        if len(chosen) > 1 or chosen[0].baseline is None:
            parser.error("--baseline takes one variant, and one that has a baseline")
        chosen.insert(0, variant.load(chosen[0].baseline))
    folders = [arguments.records_dir / one.name for one in chosen] if arguments.records_dir else None
    with _console.progress_bar() as progress:
        paths = latency.measure(
            chosen,
            workload.load(arguments.workload, variant.repository_root()),
            command=sys.argv,
            rounds=arguments.rounds,
            port=arguments.port,
            records_folders=folders,
            progress=progress,
        )
    for path in paths:
        _console.console.print(tables.results_table(path).as_rich())
    for path in paths[1:]:
        _console.console.print(tables.latency_comparison(paths[0], path).as_rich())
    for path in paths:
        _console.console.print(f"record: {path}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    _console.run(main)
