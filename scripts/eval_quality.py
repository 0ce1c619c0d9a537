"""Score a variant over a suite and write experiments/<variant>/quality_<time>.json."""

import argparse
import sys
from pathlib import Path

import _console

from slimqwen import variant
from slimqwen.evaluation import quality
from slimqwen.records import store
from slimqwen.report import tables


def main() -> int:
    """Parse, measure, show."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", required=True)
    parser.add_argument("--suite", help="a file of eval/suites/ (default: its config.env's EVALUATION)")
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument("--limit", type=int, help="items of each task (default: those that decide)")
    extent.add_argument("--full", action="store_true", help="all items")
    parser.add_argument("--chat", action="store_true", help="ask through /v1/chat/completions")
    parser.add_argument(
        "--thinking",
        choices=["on", "off"],
        help="of every task, instead of what the suite says; for prompts that go through a chat template",
    )
    parser.add_argument(
        "--records-dir", type=Path, help="write to DIR/<variant>/ instead of experiments/<variant>/"
    )
    parser.add_argument("--port", type=int, help="of the server, running or to be started")
    arguments = parser.parse_args()

    chosen = variant.load(arguments.variant)
    suite = quality.load_suite(arguments.suite or chosen.evaluation, chosen.root)
    if arguments.thinking:
        suite = suite.with_thinking(arguments.thinking == "on", chat=arguments.chat)
    limit: quality.Limit = quality.DECIDING if arguments.limit is None else arguments.limit
    with _console.progress_bar() as progress:
        path = quality.measure(
            chosen,
            suite,
            command=sys.argv,
            limit=None if arguments.full else limit,
            chat=arguments.chat,
            port=arguments.port,
            records_folder=arguments.records_dir and arguments.records_dir / chosen.name,
            progress=progress,
        )
    _console.console.print(tables.results_table(path).as_rich())
    for task, row in store.read(path)["tasks"].items():
        if (needed := row["items_to_decide"]) is not None and needed > row["item_count"]:
            _console.console.print(
                f"{task}: a margin of {row['non_inferiority_margin']:g} takes {needed:,} items to decide if what the "
                f"suite assumes holds; asked were {row['item_count']:,} of {row['available_count']:,}",
                soft_wrap=True,
            )
    _console.console.print(f"record: {path}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    _console.run(main)
