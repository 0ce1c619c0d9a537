"""Fetch the hub datasets and nltk resources that a suite is asked from into data/, or check those that are there."""

import argparse
import os

from _console import console, progress_bar, run

from slimqwen import variant
from slimqwen.evaluation import datasets, quality


def main() -> int:
    """Fetch, and tell the commit of each dataset."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", default="core", help="a file of eval/suites/ (default: %(default)s)")
    root = variant.repository_root()
    suite = quality.load_suite(parser.parse_args().suite, root)
    # The hub's client reads these when it is imported: else it shows bars of its own and sends telemetry.
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if not (suite.datasets or suite.nltk):
        console.print(f"suite {suite.name} needs nothing that is not in this repository")
    with progress_bar() as progress:
        for dataset in suite.datasets:
            here = datasets.fetch(dataset, root, progress)
            how = (
                "is there, every file as it was fetched"
                if here.was_here
                else "is complete, as the hub lists it"
            )
            console.print(
                f"{dataset.folder} {how}: {dataset.repository} at {here.revision}, {here.size_bytes / 1e6:.1f} MB"
                + ("" if dataset.revision else f"; to pin it: `revision: {here.revision}` in eval/suites/"),
                markup=False,
                soft_wrap=True,
            )
        for archive in datasets.fetch_nltk(suite.nltk, root):
            console.print(f"{archive.relative_to(root)} is there", markup=False)
    return 0


if __name__ == "__main__":
    run(main)
