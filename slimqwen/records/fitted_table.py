"""A table for a terminal of any width: no figure loses a digit."""

from collections.abc import Iterable, Sequence
from typing import Any

import rich.table
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

_WORD_WIDTH = 24  # a longer word of text, such as a path, may be folded


class FittedTable(rich.table.Table):
    """A rich table that breaks cells only between words, and is split into blocks of columns where it is too wide.

    Every block repeats the first column. Only words of left-aligned text are folded: in the first column those longer
    than half of the console's width, in others those of more than 24 characters.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table, or blocks of it one below the other if its longest lines do not fit."""
        width, everything = options.max_width, range(len(self.columns))
        if sum(map(self._longest_line, everything)) <= self._room(len(everything), width):
            yield from super().__rich_console__(console, options)
            return
        blocks = self._blocks(width)
        for number, chosen in enumerate(blocks):
            block = self._block(chosen, width)
            block.title = self.title if number == 0 else None
            block.caption = self.caption if len(blocks) == 1 else None
            yield from block.__rich_console__(console, options)
        if self.caption and len(blocks) > 1:  # below the last block it would have that block's width
            yield console.render_str(str(self.caption), style="table.caption")

    def _blocks(self, width: int) -> list[list[int]]:
        """Numbers of the columns of each block: the first column, and as many others as fit at their least width."""
        blocks = [[0]]
        for number in range(1, len(self.columns)):
            wider = [*blocks[-1], number]
            if len(wider) > 2 and sum(self._least_widths(wider, width)) > self._room(len(wider), width):
                blocks.append([0])
            blocks[-1].append(number)
        return blocks

    def _block(self, chosen: Sequence[int], width: int) -> rich.table.Table:
        """A plain table of some columns, each with a fixed width; rows that are empty there are left out."""
        block = rich.table.Table(
            box=self.box, padding=self.padding, pad_edge=self.pad_edge, title_justify=self.title_justify
        )
        block.caption_justify = self.caption_justify
        for number, cells in zip(chosen, self._widths(chosen, width), strict=True):
            column = self.columns[number]
            block.add_column(column.header, justify=column.justify, width=cells, overflow="fold")
        for row in zip(*(list(self.columns[number].cells) for number in chosen), strict=True):
            if any(_plain(cell) for cell in row):
                block.add_row(*row)
        return block

    def _widths(self, chosen: Sequence[int], width: int) -> list[int]:
        """Widths of a block's columns: the least, and equal parts of what is left for those with longer cells."""
        widths, wanted = self._least_widths(chosen, width), [self._longest_line(number) for number in chosen]
        while (left := self._room(len(chosen), width) - sum(widths)) > 0:
            short = [place for place, cells in enumerate(widths) if cells < wanted[place]]
            if not short:
                break
            for place in short[:left]:
                widths[place] += 1
        return widths

    def _least_widths(self, chosen: Sequence[int], width: int) -> list[int]:
        """The width of each column's longest word, but of text no more than is not to be folded."""
        limits = {0: width // 2}
        least = []
        for number in chosen:
            longest = _longest(word for line in self._lines(number) for word in line.split())
            is_text = self.columns[number].justify == "left"
            least.append(min(longest, limits.get(number, _WORD_WIDTH)) if is_text else longest)
        if len(chosen) == 2:  # the first column yields to a wide one
            least[0] = max(1, min(least[0], self._room(2, width) - least[1]))
        return least

    def _room(self, count: int, width: int) -> int:
        """Characters for the cells of `count` columns beside their padding and frame."""
        _, right, _, left = self.padding
        frame = count + 1 if self.box else 0
        edges = 0 if self.pad_edge else left + right
        return width - count * (left + right) + edges - frame

    def _longest_line(self, number: int) -> int:
        return _longest(self._lines(number))

    def _lines(self, number: int) -> Iterable[str]:
        column = self.columns[number]
        return (line for cell in (column.header, *column.cells) for line in _plain(cell).splitlines())


def _plain(cell: Any) -> str:
    return cell.plain if isinstance(cell, Text) else Text.from_markup(str(cell)).plain


def _longest(texts: Iterable[str]) -> int:
    return max((Text(text).cell_len for text in texts), default=1)
