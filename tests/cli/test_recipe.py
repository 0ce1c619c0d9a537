"""Sources of a calibration text on the command line; what a recipe says when its checkpoint is made."""

from dataclasses import replace
from pathlib import Path

import pytest
import typer

from slimqwen.cli.recipe import _compare_with_baseline, _parse_source
from slimqwen.errors import SlimqwenError
from slimqwen.recipe import served_baseline
from slimqwen.text.calibration_mix import Source
from slimqwen.variant import load, repository_root


def test_sources_are_written_as_name_file_weight():
    assert _parse_source("code=data/code.jsonl:2.5") == Source("code", Path("data/code.jsonl"), 2.5)
    assert _parse_source("code=data/code.jsonl") == Source("code", Path("data/code.jsonl"))
    assert _parse_source("code=c:/code.jsonl") == Source("code", Path("c:/code.jsonl"))
    text = repository_root() / "eval" / "texts" / "tinyworld.jsonl"
    assert _parse_source("tinyworld:2") == Source("tinyworld", text, 2.0)


@pytest.mark.parametrize("given", ["code=a.txt:0", "code=a.txt:0.0", "=a.txt", "", ":2"])
def test_a_source_without_a_name_or_a_weight_is_refused(given):
    with pytest.raises(typer.BadParameter, match=r"write NAME=FILE, or NAME=FILE:2"):
        _parse_source(given)


def test_a_comparison_with_the_baseline_that_fails_is_a_line_beside_the_checkpoint(monkeypatch, tmp_path):
    said = {"made": "2.9 tokens a step", "lost": SlimqwenError("no server; start one")}

    def compare(variant, outcomes, progress):
        if isinstance(said[outcomes], Exception):
            raise said[outcomes]
        return said[outcomes]

    monkeypatch.setattr(served_baseline, "compare_drafts", compare)
    one = replace(load("tiny"), root=tmp_path)
    assert _compare_with_baseline(one, "made") == said["made"]
    line = _compare_with_baseline(one, "lost")
    assert line.startswith("not compared with the served baseline: no server; start one (log: ")
    assert (tmp_path / "logs" / "baseline-of-tiny.log").is_file()
