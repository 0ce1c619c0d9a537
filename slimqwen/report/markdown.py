"""Generated tables in Markdown files: the text between a pair of comments is made from records.

    <!-- table:comparison tiny tiny-awq -->
    <!-- end -->

`table:KIND VARIANT` shows the newest record of each topic of a kind, with "-" for "_" in the kind; `TABLES` lists the
other tables. A table names its records and is made from them again; newer ones replace them only if `newest` is set.
"""

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from slimqwen.errors import SlimqwenError, suggest_name
from slimqwen.fit.step_bytes import step_bytes_table
from slimqwen.fit.tables import shapes_table
from slimqwen.plan.record import overview_table
from slimqwen.records import collection, registry, store
from slimqwen.records.record import Record
from slimqwen.records.table import Table
from slimqwen.report import tables
from slimqwen.report.cells import cells_table

_BLOCK = re.compile(
    r"(?P<open><!-- table:(?P<name>[\w-]+)(?P<words>[^\n]*?) -->\n)(?P<text>.*?)(?P<close><!-- end -->)",
    re.DOTALL,
)
_RECORD = re.compile(r"[\w.-]+/\w[\w.-]*_\d{4}-\d\d-\d\dT\d{6}Z\.json")

TABLES: Mapping[str, tuple[str, Callable[..., Sequence[Table]]]] = MappingProxyType(
    {
        "variants": ("", lambda root: [tables.variants_table(root)]),
        "results": ("VARIANT", lambda root, name: tables.results_tables(root / "experiments" / name)),
        "comparison": (
            "BASELINE VARIANT",
            lambda root, *names: tables.comparison_tables(*(root / "experiments" / name for name in names)),
        ),
        "plans": ("", lambda root: [overview_table(root)]),
        "cells": ("", lambda root: [cells_table(collection.collect(root))]),
        "fit": ("", lambda root: [shapes_table(root)]),
        "step-bytes": ("", lambda root: [step_bytes_table(root)]),
        "patches": ("", lambda root: [tables.patches_table()]),
        "summary": ("BASELINE VARIANT", lambda root, *names: [tables.summary_table(root, *names)]),
    }
)
"""Tables over several records, by name: usage text of the arguments, and the function that makes the table."""


class MarkdownError(SlimqwenError):
    """A Markdown file names an unknown table or gives it other arguments, or does not close a table block."""


def files(root: Path) -> list[Path]:
    """Markdown files that may have table blocks: README.md, those of docs/, and the README.md of each variant."""
    return [
        file
        for pattern in ("README.md", "docs/**/*.md", "experiments/*/README.md")
        for file in sorted(root.glob(pattern))
    ]


def update_tables(root: Path, pages: Iterable[Path] | None = None, *, newest: bool = False) -> list[Path]:
    """Rewrite Markdown files whose tables differ from their records; returns these files.

    Args:
        pages: the files to look at; by default `files`.
        newest: whether newer records replace those that a table names.

    Raises:
        MarkdownError: a block names an unknown table, has other arguments or is not closed; the message names the file.
        RecordError: a record is damaged.
    """
    changed = []
    for file in files(root) if pages is None else pages:
        text = render_tables(root, file, newest=newest)
        if text != file.read_text(encoding="utf-8"):
            changed.append(file)
            file.write_text(text, encoding="utf-8")
    return changed


def render_tables(root: Path, file: Path, *, newest: bool = False) -> str:
    """Return the content of a Markdown file with its tables made again from their records; nothing is written.

    Args:
        newest: whether newer records replace those that a table names.

    Raises:
        MarkdownError: a block names an unknown table, has other arguments or is not closed; the message names the file.
        RecordError: a record is damaged.
    """
    text = file.read_text(encoding="utf-8")
    location = file.relative_to(root)
    if text.count("<!-- table:") != len(_BLOCK.findall(text)):
        raise MarkdownError(f"{location}: a <!-- table:… --> comment has no <!-- end --> after it; add that")

    def render(block: re.Match[str]) -> str:
        named = [] if newest else _RECORD.findall(block["text"])
        with store.list_only(named) if _exist(root, named) else contextlib.nullcontext():
            return block["open"] + _content(root, block["name"], block["words"].split()) + block["close"]

    try:
        return _BLOCK.sub(render, text)
    except MarkdownError as error:
        raise MarkdownError(f"{location}: {error}") from error


def _exist(root: Path, named: Sequence[str]) -> bool:
    """Whether a table names records and all of them exist; if not, the table is made from the newest records."""
    return bool(named) and all((root / "experiments" / name).is_file() for name in named)


def _content(root: Path, name: str, words: Sequence[str]) -> str:
    """Text of one block: its tables, or the command that makes the missing record."""
    arguments, build = TABLES.get(name, ("VARIANT", lambda root, variant: _newest(root, name, variant)))
    known = [*TABLES, *(kind.replace("_", "-") for kind in registry.kinds())]
    if name not in known:
        raise MarkdownError(f"there is no table {name!r}; {suggest_name(name, known)}")
    if len(words) != len(arguments.split()):
        raise MarkdownError(
            f"the table {name} does not take {' '.join(words) or 'nothing'}; write "
            f"<!-- {' '.join(filter(None, (f'table:{name}', arguments)))} -->"
        )
    try:
        return "\n".join(table.as_markdown() for table in build(root, *words))
    except store.MissingRecordError as missing:
        return f"Not measured: {missing}.\n"


def _newest(root: Path, name: str, variant: str) -> list[Table]:
    model = registry.kinds()[name.replace("-", "_")]
    folder = root / "experiments" / variant
    store.latest(folder, model)  # raises the error that names the command where there is none
    newest: dict[str, tuple[Path, Record]] = {}
    for path, record in store.comparable(store.records(folder, model), model, lambda _: True):
        newest.setdefault(record.topic, (path, record))
    return [table for _, (path, record) in sorted(newest.items()) for table in record.tables(path)]
