"""Tables in a terminal of any width, by what a reader can still read."""

import io

import pytest
from rich.console import Console

from slimqwen.records.table import Table

FIGURES = ("1.81x [1.02, 3.24] as fast", "-36.50", "16,384,123.25", "+0.014 to +0.031")
WIDE = Table(
    "A title of several words",
    ("measure", *(f"column {number}" for number in range(8))),
    tuple((f"row {name}", *FIGURES, *FIGURES) for name in "abc"),
    ("A note that is longer than one of the blocks, and is printed once.",),
)


def shown(table, width):
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(table)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80, 120, 400])
def test_every_figure_of_every_row_is_shown_whole_within_the_width(width):
    text = shown(WIDE.as_rich(), width)
    words = text.split()
    for figure in " ".join(FIGURES).split():
        assert words.count(figure) >= 6, figure
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text


def test_a_table_that_fits_is_one_block_and_a_wide_one_repeats_the_first_column():
    assert shown(WIDE.as_rich(), 400).count("row a") == 1
    narrow = shown(WIDE.as_rich(), 60)
    assert narrow.count("row a") == narrow.count("measure") > 1
    assert narrow.count("A title") == narrow.count("A note") == 1


def test_a_long_word_of_text_is_folded_and_loses_nothing():
    path = "records/" + "a" * 90
    text = shown(Table("", ("file", "bytes"), ((path, "12,345.6"),)).as_rich(), 50)
    folded = "".join(line.split()[0] for line in text.splitlines() if "a" * 5 in line)
    assert folded == path
    assert "12,345.6" in text


def test_markup_in_a_cell_is_text_and_wide_letters_count_twice():
    text = shown(Table("", ("name", "value"), (("[bold]", "1.5"), ("宽" * 10, "2.5"))).as_rich(), 30)
    assert "[bold]" in text
    assert "2.5" in text


def test_a_row_that_is_empty_in_a_block_is_left_out_there():
    table = Table(
        "", ("stage", "size", "why"), (("calibrate", "1" * 30, ""), ("", "", "because " * 3)), (), 1
    )
    text = shown(table.as_rich(), 60)
    assert text.count("because") == 3
