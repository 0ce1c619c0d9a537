"""The trace of a stage (`tests/recipe/conftest.py`) sees what its key leaves out."""

import importlib
from dataclasses import replace
from pathlib import Path

import pytest

from slimqwen.checkpoint.files import carry_all
from slimqwen.progress import Progress
from slimqwen.recipe.stage import Facts
from tests.identity import coverage_by_keys
from tests.recipe.fake_stages import STAGES, AddParameters
from tests.recipe.workshop import Workshop


def hide(source: Path, destination: Path, parameters: AddParameters, progress: Progress) -> Facts:
    """Copy, and call what no name leads to."""
    carry_all(source, destination)
    importlib.import_module("slimqwen" + ".redaction").text("of a stage")
    return {}


def test_a_stage_that_executes_what_its_key_leaves_out_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STAGES, "hide", replace(STAGES["add"], name="hide", run=hide))
    workshop = Workshop(tmp_path / "workshop")
    (tmp_path / "calls").mkdir()
    with (
        coverage_by_keys.every_stage_covered(tmp_path / "calls"),
        pytest.raises(AssertionError, match=r"leaves out: \['slimqwen\.redaction: text'\]"),
    ):
        workshop.run(workshop.recipe("hide"))
