"""How an exploration of scripts/ is run."""

import argparse
import json

import pytest

from slimqwen import variant
from slimqwen.cli import exploration
from slimqwen.records.table import Table


def test_an_exploration_prints_its_table_and_writes_its_figures(
    tiny: variant.Variant, capsys: pytest.CaptureFixture[str]
):
    table = Table("Sizes", ("size",), (("3",),))
    exploration.run_exploration(
        "sizes", argparse.ArgumentParser(), lambda *_: (table, {"sizes": [3]}), ["--variant", "tiny"]
    )
    file = tiny.root / "results" / "explorations" / "sizes_tiny.json"
    content = json.loads(file.read_text())
    assert content["sizes"] == [3]
    assert len(content["provenance"]["checkpoint"]["digest"]) == 64
    assert "| 3 |" in capsys.readouterr().out


def test_an_expected_error_of_an_exploration_is_one_line(
    tiny: variant.Variant, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit, match="2"):
        exploration.run_exploration(
            "sizes", argparse.ArgumentParser(), lambda *_: ({}, {}), ["--variant", "none"]
        )
    assert capsys.readouterr().err.startswith("error: ")
    assert not (tiny.root / "results").exists()
