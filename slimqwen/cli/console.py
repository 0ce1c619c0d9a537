"""The terminal: results on stdout, one-line errors on stderr, progress bars, exit codes."""

import gc
import io
import logging
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TextIO

import typer
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
from rich.table import Column
from typer.core import TyperCommand

from slimqwen import progress, variant
from slimqwen.cli.installed import outdated
from slimqwen.cli.unexpected import report_unexpected
from slimqwen.errors import SlimqwenError
from slimqwen.host import allowed_cpus, physical_cores, user_variables
from slimqwen.lifeline import ProcessEndsError
from slimqwen.processes.worker import GARBAGE_THRESHOLD
from slimqwen.records.fitted_table import FittedTable
from slimqwen.workspace import WorkspaceError, name_installer

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # for imports of vLLM in this process
logging.getLogger("vllm").setLevel(logging.ERROR)  # vLLM warns before it reads that variable


class _Terminal(Console):
    has_printed = threading.Event()
    """Whether this command has printed anything, on any stream."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as rich does."""
        self.has_printed.set()
        super().print(*objects, **options)

    def on_broken_pipe(self) -> None:
        """End quietly if the reader of a pipe has closed it, as `head` does, with the exit code of SIGPIPE."""
        with suppress(SystemExit):
            super().on_broken_pipe()
        raise SystemExit(128 + signal.SIGPIPE)


def _can_redraw(stream: TextIO) -> bool:
    """Whether lines can be drawn again. rich also believes FORCE_COLOR, which asks for colours in a file."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")


# Bound to the stream itself, because `capture_output` replaces sys.stdout. A file gets lines as wide as any table.
console = _Terminal(
    highlight=False,
    file=sys.stdout,
    width=None if sys.stdout.isatty() else 120,
    force_interactive=_can_redraw(sys.stdout),
)
errors = _Terminal(stderr=True, highlight=False, soft_wrap=True, force_interactive=_can_redraw(sys.stderr))

EXIT_CODES = {"pass": 0, "fail": 1, "inconclusive": 2}
"""Exit codes of verbs whose exit code is a verdict; their exit code for an error is 3."""

_SILENT_S = 2.0
"""Seconds without output after which a terminal is told that libraries are loaded; vLLM takes 10 to 40 s."""

_OPEN_FILES = 65_536

_LINE_S = 60.0
"""Seconds between two progress lines about one activity, if output goes to a file."""

_COUNTED = 10_000
"""Largest total that a progress line shows as a number, as of layers or texts; larger ones, as of bytes, as a share."""

_UNEXPECTED, _REFUSED, _REFUSED_BY_JUDGE, _INTERRUPTED = 1, 2, 3, 130


class Judge(TyperCommand):
    """Class of verbs whose exit code is a verdict, given to typer as `cls`: 0 pass, 1 fail, 2 inconclusive, 3 error."""

    def make_context(self, *arguments: Any, **keywords: Any) -> Any:
        """Parse the command line; a usage error ends with exit code 3."""
        with _errors_of_judge():
            return super().make_context(*arguments, **keywords)

    def invoke(self, ctx: Any) -> Any:
        """Run the verb; an error ends with exit code 3."""
        with _errors_of_judge():
            return super().invoke(ctx)


@contextmanager
def _errors_of_judge() -> Iterator[None]:
    try:
        yield
    except SlimqwenError as error:
        show_error(str(error))
    except typer.TyperException as error:
        show_usage_error(error)
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        report_unexpected(error)
    else:
        return
    raise typer.Exit(_REFUSED_BY_JUDGE)


def run_command_line(app: typer.Typer, name: str) -> None:
    """Run a command line and exit.

    Exit codes: 2 for an expected error, 1 for any other, with one line on stderr; 130 for Ctrl-C; 143 for SIGTERM and
    129 for SIGHUP, as of a terminal that was closed, both of which end child processes and remove temporary folders.

    Args:
        app: the application, whose arguments are those of this process.
        name: name of the program in its help.
    """
    app.pretty_exceptions_enable = False
    interrupt_code = _INTERRUPTED

    def terminate(number: int, _: object) -> None:
        nonlocal interrupt_code
        interrupt_code = 128 + number
        raise ProcessEndsError

    # All end alike, which stops child processes; nohup ignores SIGHUP, so that work goes on.
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    numbers = [each for each in signals if signal.getsignal(each) != signal.SIG_IGN]
    before = {number: signal.signal(number, terminate) for number in numbers}
    gc.set_threshold(GARBAGE_THRESHOLD)
    _allow_open_files()
    if errors.is_interactive:
        _Terminal.has_printed.clear()
        timer = threading.Timer(_SILENT_S, _say_that_libraries_load)
        timer.daemon = True
        timer.start()
    if allowed_cpus() < len(os.sched_getaffinity(0)):
        # torch starts a thread for each CPU of the machine, but a container may have the time of only a few CPUs.
        os.environ.setdefault("OMP_NUM_THREADS", str(physical_cores()))
    os.environ.update(user_variables(os.environ, workspace_or_here()))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal may be unable to show "…"
    if reason := outdated():
        errors.print(name_installer(f"warning: {reason}; run `make install`"), markup=False)
    try:
        code = app(prog_name=name, standalone_mode=False)
    except SlimqwenError as error:
        show_error(str(error))
        code = _REFUSED
    except typer.TyperException as error:
        show_usage_error(error)
        code = _REFUSED
    except (KeyboardInterrupt, typer.Abort):
        code = _INTERRUPTED
    except Exception as error:
        report_unexpected(error)
        code = _UNEXPECTED
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if code == _INTERRUPTED:
        with suppress(OSError):  # the terminal is gone
            errors.print("interrupted" if interrupt_code == _INTERRUPTED else "terminated")
        code = interrupt_code
    sys.exit(_flush_output() or code or 0)


def _say_that_libraries_load() -> None:
    if not _Terminal.has_printed.is_set():
        errors.print("loading libraries …")


def _allow_open_files() -> None:
    """Raise the limit of open files as far as this user may: shells allow 256 or 1,024, a server needs hundreds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _flush_output() -> int:
    """Flush stdout; returns 0, or the exit code if that fails, for example because the disk is full."""
    try:
        sys.stdout.flush()
    except OSError as error:
        # Python flushes stdout once more at exit and would print a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        report_unexpected(error)
        return _UNEXPECTED
    return 0


def workspace_or_here() -> Path:
    """The workspace, or the working folder where there is none: `slimqwen init` and `--help` need none."""
    try:
        return variant.repository_root()
    except WorkspaceError:
        return Path.cwd()


def show_error(message: str) -> None:
    """Print an expected error on stderr."""
    errors.print(name_installer(f"error: {from_here(message)}"), markup=False)


def from_here(text: str) -> str:
    """Rewrite paths in a text so that they lead to the repository's files from the shell's working folder.

    The library names files from the root of the repository, or by absolute paths. From another
    working folder the first lead nowhere, and the others can be shortened.
    """
    root = workspace_or_here()
    with suppress(OSError):  # the working folder is gone
        text = re.sub(rf"(?<![\w./=~-]){re.escape(str(Path.cwd()))}/(?=\w)", "", text)
        if Path.cwd() != root:
            return _PATH.sub(lambda match: _name_from_here(match[0], root), text)
    return text


_PATH = re.compile(r"(?<![\w./=~-])\w[\w.@+-]*(?:/[\w.@+-]+)+")
"""A relative path in a message; no part of a longer one, and no value of a line of config.env."""


def _name_from_here(path: str, root: Path) -> str:
    is_of_root = (root / path.rstrip(".")).exists() and not Path(path.rstrip(".")).exists()
    return str(relative(root / path)) if is_of_root else path


def show_usage_error(error: typer.TyperException) -> None:
    """Print a usage error on stderr."""
    if message := error.format_message():  # empty where the help was shown instead
        show_error(f"{' '.join(message.split()).rstrip('.')}. `--help` lists verbs and options.")


def say(text: str) -> None:
    """Print text unchanged: markup is not interpreted, and no line breaks are added."""
    console.print(text, markup=False, soft_wrap=True)


def warn(text: str) -> None:
    """Print a line of text unchanged on stderr."""
    errors.print(text, markup=False)


def duration(seconds: float) -> str:
    """A time as text in a fitting unit: "90 s" below 2 minutes, "45 min" below 2 hours, else "2.5 h"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def command() -> list[str]:
    """The command line of this process, as the provenance of records states it."""
    return ["slimqwen", *sys.argv[1:]]


def relative(path: Path) -> Path:
    """The path relative to the working folder if both lie in the repository, else unchanged."""
    root = workspace_or_here()
    both_inside = path.is_relative_to(root) and Path.cwd().is_relative_to(root)
    return Path(os.path.relpath(path)) if both_inside else path


def show_record(path: Path, log: Path | None = None) -> Any:
    """Print the tables and the path of a new record; returns the record.

    Args:
        path: file of the record.
        log: log of the measurement, whose path is printed, too; None for none.
    """
    from slimqwen.records import store

    record = store.read_record(path)
    for shown in record.tables(path):
        console.print(shown.as_rich())
    if record.provenance.host_was_busy:
        say("The host was busy: this record is marked, and no comparison uses it.")
    files = {"record": path, "log": log}
    say(", ".join(f"{name}: {relative(file)}" for name, file in files.items() if file))
    return record


@contextmanager
def measuring(log: Path) -> Iterator[progress.Progress]:
    """Show a progress bar during a `with` block; everything that libraries print in it goes into a log."""
    from slimqwen.captured_log import capture_output

    with progress_bar() as shown, capture_output(log):
        yield shown


def table(text: Sequence[str], figures: Sequence[str]) -> FittedTable:
    """An empty table without rules: left-aligned columns with headings `text`, then right-aligned `figures`."""
    empty = FittedTable(*text, box=None, pad_edge=False)
    for heading in figures:
        empty.add_column(heading, justify="right")
    return empty


@contextmanager
def progress_bar() -> Iterator[progress.Progress]:
    """Show a bar per activity with the time left; if output is a file, a line per activity, then one each minute."""
    with _bars() if console.is_interactive else _lines() as show:
        yield show


def waiting(activity: str) -> AbstractContextManager[object]:
    """Show on stderr, during a `with` block, what it waits for; nothing if stderr is not a terminal."""
    return errors.status(activity) if errors.is_interactive else nullcontext()


@contextmanager
def _bars() -> Iterator[progress.Progress]:
    columns = (
        TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis")),
        BarColumn(bar_width=20),
        TaskProgressColumn(),
        TimeElapsedColumn(table_column=Column(no_wrap=True)),
        TimeRemainingColumn(table_column=Column(no_wrap=True)),
        TextColumn("left"),
    )
    with Progress(*columns, console=console) as bars:
        tasks: dict[str, tuple[str, TaskID]] = {}

        def show(activity: str, done: float, total: float) -> None:
            # One bar for each subject; it shows only the subject's present activity.
            subject = _subject(activity)
            if subject in tasks and tasks[subject][0] != activity:
                bars.remove_task(tasks.pop(subject)[1])
            if subject not in tasks:
                tasks[subject] = activity, bars.add_task(activity, total=None)
            bars.update(tasks[subject][1], completed=done, total=total or None)

        yield show


@contextmanager
def _lines() -> Iterator[progress.Progress]:
    known: set[str] = set()
    # Subject -> its present activity, the time of that activity's last line, and its progress at that time.
    lines: dict[str, tuple[str, float, float]] = {}

    def show(activity: str, done: float, total: float) -> None:
        now, subject = time.monotonic(), _subject(activity)
        if activity not in known and (not total or done < total):
            say(f"{activity} …")
        known.add(activity)
        present, at, before = lines.setdefault(subject, (activity, now, done))
        # The activity begins, perhaps again after others of its subject, or has ended.
        if activity != present or done < before or done >= total:
            lines[subject] = activity, now, done
        elif done > before and (not before or now - at >= _LINE_S):
            # Until the first step is done, time passes for the start, such as loading a model: it foretells nothing.
            lines[subject] = activity, now, done
            left_s = (now - at) * (total - done) / (done - before)
            share = f"{done:g}/{total:g}" if total <= _COUNTED else f"{done / total:.0%}"
            if now - at >= _LINE_S:
                say(f"{activity} {share}{f', about {left_s / 60:.0f} min left' if before else ''}")

    yield show


def _subject(activity: str) -> str:
    """What an activity is about, such as "quality of tiny" before a colon; nothing for a command's own."""
    return activity.partition(": ")[0] if ": " in activity else ""


def silence_hub_client() -> None:
    """Keep huggingface_hub from printing its own bars and warnings and from sending telemetry.

    Must be called before it is imported, because it reads these variables at import.
    """
    for name, value in (
        ("HF_HUB_VERBOSITY", "error"),
        ("HF_HUB_DISABLE_TELEMETRY", "1"),
        ("HF_HUB_DISABLE_PROGRESS_BARS", "1"),
    ):
        os.environ.setdefault(name, value)
