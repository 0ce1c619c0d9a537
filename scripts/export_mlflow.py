"""Send the records to an MLflow tracking store; what it has already is not sent again."""

import argparse

from _console import console, progress_bar, run

from slimqwen import variant
from slimqwen.records import mlflow_export


def main() -> int:
    """Parse, send, say what was sent."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--uri", help="of the store (default: the SQLite file mlruns/mlflow.db of this repository)"
    )
    arguments = parser.parse_args()
    with progress_bar() as progress:
        exported = mlflow_export.export(variant.repository_root(), arguments.uri, progress)
    console.print(
        f"{len(exported.added)} records sent, {exported.known} were there already: experiment "
        f"{mlflow_export.EXPERIMENT} of {exported.uri}",
        markup=False,
        soft_wrap=True,
    )
    for problem in exported.problems:
        console.print(f"left out: {problem.place}: {problem.reason}", markup=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    run(main)
