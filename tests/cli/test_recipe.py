"""Sources of a calibration text on the command line."""

from pathlib import Path

import pytest
import typer

from slimqwen.cli.recipe import _parse_source
from slimqwen.text.calibration_mix import Source
from slimqwen.variant import repository_root


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
