"""What every script shows a person: one line for an expected error, progress bars, one console."""

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from slimqwen import progress, running, variant
from slimqwen.errors import SlimqwenError

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # for imports of vLLM in the script's own process

# The stream itself: libraries get another one. In a file, lines as wide as the widest table.
console = Console(highlight=False, file=sys.stdout, width=None if sys.stdout.isatty() else 120)
logging.getLogger("vllm").setLevel(logging.ERROR)  # it warns before it has read that variable
errors = Console(stderr=True, highlight=False, soft_wrap=True)

# By what a script that judges found.
EXIT_CODES = {"pass": 0, "fail": 1, "inconclusive": 2}


def run(main: Callable[[], int], refused: int = 2) -> None:
    """Run a script's main and exit: 130 for Ctrl-C, else what main says.

    Args:
        main: the script.
        refused: the exit code, beside one line, for an expected error.
    """
    try:
        sys.exit(main())
    except SlimqwenError as error:
        errors.print(f"error: {error}", markup=False)
        sys.exit(refused)
    except KeyboardInterrupt:
        errors.print("interrupted")
        sys.exit(130)


def table(text: Sequence[str], figures: Sequence[str]) -> Table:
    """An empty table without lines: columns of text, then columns of figures."""
    empty = Table(*text, box=None, pad_edge=False)
    for heading in figures:
        empty.add_column(heading, justify="right")
    return empty


@contextmanager
def progress_bar() -> Iterator[progress.Progress]:
    """A live bar per activity with time left on a terminal; one line an activity where output is a file.

    What it is told is also published for `make watch`.
    """
    published = running.publishing(variant.repository_root(), sys.argv)
    with published as publish, _bars() if console.is_terminal else _lines() as show:

        def tell(activity: str, done: float, total: float) -> None:
            publish(activity, done, total)
            show(activity, done, total)

        yield tell


@contextmanager
def _bars() -> Iterator[progress.Progress]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bars:
        tasks: dict[str, TaskID] = {}

        def show(activity: str, done: float, total: float) -> None:
            if activity not in tasks:
                tasks[activity] = bars.add_task(activity, total=None)
            bars.update(tasks[activity], completed=done, total=total or None)

        yield show


@contextmanager
def _lines() -> Iterator[progress.Progress]:
    told: set[str] = set()

    def show(activity: str, done: float, total: float) -> None:
        if activity not in told:
            told.add(activity)
            console.print(f"{activity} …", markup=False)

    yield show
