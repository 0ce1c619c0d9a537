"""Generated tables in Markdown files: the text between a pair of comments is made from records.

    <!-- table:comparison tiny tiny-awq -->
    <!-- end -->

`table:KIND VARIANT` is the newest record of a kind, with "-" for "_" in the kind; `TABLES` has the others.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from slimqwen.errors import SlimqwenError
from slimqwen.fit.tables import shapes_table
from slimqwen.plan.record import overview_table
from slimqwen.records import registry, store
from slimqwen.records.table import Table
from slimqwen.report import tables

_BLOCK = re.compile(
    r"(?P<open><!-- table:(?P<name>[\w-]+)(?P<words>[^\n]*?) -->\n).*?(?P<close><!-- end -->)", re.DOTALL
)

TABLES: Mapping[str, tuple[str, Callable[..., Sequence[Table]]]] = MappingProxyType(
    {
        "variants": ("", lambda root: [tables.variants_table(root)]),
        "results": ("VARIANT", lambda root, name: tables.results_tables(root / "experiments" / name)),
        "comparison": (
            "BASELINE VARIANT",
            lambda root, *names: tables.comparison_tables(*(root / "experiments" / name for name in names)),
        ),
        "plans": ("", lambda root: [overview_table(root)]),
        "fit": ("", lambda root: [shapes_table(root)]),
        "summary": ("BASELINE VARIANT", lambda root, *names: [tables.summary_table(root, *names)]),
    }
)
"""Tables over several records: arguments and builder by name."""


class MarkdownError(SlimqwenError):
    """A Markdown file asks for an unknown table, or leaves a block open."""


def files(root: Path) -> list[Path]:
    """Markdown files that may have table blocks."""
    return [
        file
        for pattern in ("README.md", "docs/**/*.md", "experiments/*/README.md")
        for file in sorted(root.glob(pattern))
    ]


def update(root: Path, *, write: bool = True) -> list[Path]:
    """Rewrite every file whose tables differ from their records.

    Args:
        write: False only finds the files.

    Returns:
        The files that differed.

    Raises:
        MarkdownError: a block asks for an unknown table or is not closed; names the file.
        RecordError: a record is damaged.
    """
    changed = []
    for file in files(root):
        text = fresh(root, file)
        if text != file.read_text(encoding="utf-8"):
            changed.append(file)
            if write:
                file.write_text(text, encoding="utf-8")
    return changed


def fresh(root: Path, file: Path) -> str:
    """The content of a Markdown file with tables made from the present records.

    Raises:
        MarkdownError: a block asks for an unknown table or is not closed; names the file.
        RecordError: a record is damaged.
    """
    text = file.read_text(encoding="utf-8")
    location = file.relative_to(root)
    if text.count("<!-- table:") != len(_BLOCK.findall(text)):
        raise MarkdownError(f"{location}: a <!-- table:… --> comment lacks its <!-- end -->")
    try:
        return _BLOCK.sub(
            lambda match: (
                match["open"] + _content(root, match["name"], match["words"].split()) + match["close"]
            ),
            text,
        )
    except MarkdownError as error:
        raise MarkdownError(f"{location}: {error}") from error


def _content(root: Path, name: str, words: Sequence[str]) -> str:
    """Tables of one block; the command that makes the record if there is none."""
    arguments, build = TABLES.get(name, ("VARIANT", lambda root, variant: _newest(root, name, variant)))
    is_known = name in TABLES or name.replace("-", "_") in registry.kinds()
    if not is_known or len(words) != len(arguments.split()):
        known = [f"{table} {usage}".strip() for table, (usage, _) in TABLES.items()]
        kinds = ", ".join(kind.replace("_", "-") for kind in registry.kinds())
        raise MarkdownError(
            f"there is no table {' '.join([name, *words])!r}; use {', '.join(known)}, or KIND VARIANT with {kinds}"
        )
    try:
        return "\n".join(table.as_markdown() for table in build(root, *words))
    except store.MissingRecordError as missing:
        return f"Not measured: {missing}.\n"


def _newest(root: Path, name: str, variant: str) -> list[Table]:
    model = registry.kinds()[name.replace("-", "_")]
    if model.folder == "experiments":
        path = store.latest(root / "experiments" / variant, model)
    else:
        path = store.latest_result(root, model, variant)
    return store.read_record(path).tables(path)
