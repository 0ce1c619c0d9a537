"""Tables of figures, for the terminal or as Markdown."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Self, TypeVar

import rich.box
from rich.markup import escape

from slimqwen.records.fitted_table import FittedTable

Row = TypeVar("Row")


@dataclass(frozen=True)
class Table:
    """A table of formatted cells.

    Attributes:
        columns: headings of the columns.
        rows: the cells of each row.
        notes: sentences below the table.
        text_columns: number of columns, from the left, that hold text; the others hold figures, aligned to the right.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    text_columns: int = 1

    @classmethod
    def from_rows(
        cls,
        title: str,
        rows: Iterable[Row],
        columns: Mapping[str, Callable[[Row], object]],
        *notes: str,
        text_columns: int = 1,
    ) -> Self:
        """Make a table with a row for each object.

        Args:
            columns: for each heading, a function from a row's object to the cell; None is shown as "-".
        """
        cells = [[cell(row) for cell in columns.values()] for row in rows]
        texts = tuple(tuple("-" if cell is None else str(cell) for cell in row) for row in cells)
        return cls(title, tuple(columns), texts, notes, text_columns)

    def as_rich(self) -> FittedTable:
        """The table as an object that rich prints in a terminal of any width."""
        table = FittedTable(
            title=escape(self.title),
            title_justify="left",
            caption=escape("\n".join(self.notes)) or None,
            box=rich.box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
        )
        table.caption_justify = "left"
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="right" if number >= self.text_columns else "left")
        for row in self.rows:
            table.add_row(*map(escape, row))
        return table

    def as_markdown(self) -> str:
        """The table as Markdown: its title in bold, the rows, the notes."""
        rules = ("---:" if number >= self.text_columns else "---" for number in range(len(self.columns)))
        lines = [
            f"**{self.title}**",
            "",
            "| " + " | ".join(self.columns) + " |",
            "|" + "|".join(rules) + "|",
            *("| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in self.rows),
        ]
        return "\n".join([*lines, *(["", *(f"{note}  " for note in self.notes)] if self.notes else []), ""])
