"""Plots hold what they are given, and the same record gives the same bytes."""

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from slimqwen.report import plots
from slimqwen.report.plots import Line, Panel

DRAW = """
import sys
from pathlib import Path
from slimqwen.report.plots import Line, Panel, write
write(Path(sys.argv[1]), [Panel("x", "y", [Line("one", [1, 2], [3, 4], [0.1, 0.2]), Line("two", [1], [2])])])
"""


def coverage(scored: bool) -> dict[str, Any]:
    change = {"bits_per_byte_change": {"value": 0.1, "standard_error": 0.01}} if scored else {}
    bits = {"bits_per_byte": {"value": 1.0}} if scored else {}
    return {
        "sources": dict.fromkeys(("prose", "foreign"), bits),
        "sizes": [
            {
                "size": size,
                "sources": {
                    name: {"coverage": 1 - 1 / size, "inflation": 1 + 1 / size, **change}
                    for name in ("prose", "foreign")
                },
            }
            for size in (512, 256)
        ],
    }


def test_the_same_lines_give_the_same_bytes_in_every_process(tmp_path: Path):
    for name in ("a.svg", "b.svg"):
        subprocess.run([sys.executable, "-c", DRAW, tmp_path / name], check=True)
    drawn = (tmp_path / "a.svg").read_bytes()
    assert drawn == (tmp_path / "b.svg").read_bytes()
    assert b"date" not in drawn
    assert ElementTree.fromstring(drawn).tag.endswith("svg")


def test_a_label_has_one_place_in_the_legend(tmp_path: Path):
    line = Line("only once", [1, 2], [1, 2])
    plots.write(tmp_path / "a.svg", [Panel("x", "left", [line]), Panel("x", "right", [line])])
    assert (tmp_path / "a.svg").read_text().count(">only once<") == 1


def test_coverage_is_drawn_by_size_a_line_a_source(tmp_path: Path):
    share, inflation, change = plots.vocab_coverage(coverage(scored=True))
    assert [line.label for line in share.lines] == ["prose", "foreign"]
    assert share.lines[0].x == [256, 512]
    assert share.lines[0].y == [1 - 1 / 256, 1 - 1 / 512]
    assert inflation.lines[1].y == [1 + 1 / 256, 1 + 1 / 512]
    assert (change.lines[0].y, change.lines[0].errors) == ([0.1, 0.1], [0.01, 0.01])
    plots.write(tmp_path / "a.svg", [share, inflation, change])
    assert len(plots.vocab_coverage(coverage(scored=False))) == 2
