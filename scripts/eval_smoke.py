"""Ask a served variant five items of each task: whether it answers at all. Certifies nothing, records nothing."""

import argparse

import _console

from slimqwen import variant
from slimqwen.evaluation import quality
from slimqwen.evaluation.served import serve

ITEMS = 5
LONGEST = 1024
"""Tokens of a generation: more would not be a quick look."""


def main() -> int:
    """Ask, show, warn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", required=True)
    parser.add_argument("--suite", help="a file of eval/suites/ (default: its config.env's EVALUATION)")
    parser.add_argument("--chat", action="store_true", help="ask through /v1/chat/completions")
    parser.add_argument("--port", type=int, help="of the server, running or to be started")
    arguments = parser.parse_args()

    chosen = variant.load(arguments.variant)
    suite = quality.load_suite(arguments.suite or chosen.evaluation, chosen.root).shortened(LONGEST)
    logs = chosen.root / "logs"
    with (
        _console.progress_bar() as progress,
        serve(
            chosen, port=arguments.port, log=logs / f"serve_{chosen.name}.log", progress=progress
        ) as served,
    ):
        scores = quality.score(
            suite,
            served,
            root=chosen.root,
            limit=ITEMS,
            chat=arguments.chat,
            log=logs / f"smoke_{chosen.name}.log",
            progress=progress,
        )
    shown = _console.table(["task", "measure"], ["value", "items", "truncated", "empty", "tokens, mean"])
    for task, row in scores.tasks.items():
        counts = ("-" if row[name] is None else str(row[name]) for name in ("truncated_count", "empty_count"))
        length = f"{row['output_tokens']['mean']:.0f}" if row["output_tokens"] else "-"
        shown.add_row(task, row["measure"], f"{row['value']:.3f}", str(row["item_count"]), *counts, length)
    _console.console.print(shown)
    _console.console.print(
        f"[bold red]THIS CERTIFIES NOTHING[/bold red]: {ITEMS} items a task, no answer longer than {LONGEST:,} tokens, "
        f"nothing recorded. `make eval-quality VARIANT={chosen.name}` measures.",
        soft_wrap=True,
    )
    return 0


if __name__ == "__main__":
    _console.run(main)
