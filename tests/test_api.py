"""The Python door: the example of docs/python.md runs, on a cheap stage and stand-ins of the gate's measurements."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slimqwen import api
from slimqwen.evals import EvalError
from slimqwen.recipe.recipe_file import RecipeError
from tests.evals.gate_checks import ROOT, Checks, link_settings

RECIPE = "description: A test.\nbase: tiny\nstages: [{quantise_lm_head: {group_size: 32}}]\n"
EXAMPLE = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text(), re.DOTALL))


@pytest.fixture
def checks(
    tmp_path: Path, add_variant: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, stamps: None
) -> Checks:
    """Stand-ins in a repository with tiny and its variant mine."""
    add_variant("tiny", "VLLM_MODEL=weights/tiny\nVLLM_MAX_MODEL_LEN=256\nEVALUATION=tinyworld\n")
    config = add_variant("mine", "BASE=tiny\nVLLM_MODEL=weights/mine\n", baseline="tiny")
    (config.parent / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "tiny").symlink_to(ROOT / "weights" / "tiny")
    link_settings(tmp_path)
    monkeypatch.setattr("slimqwen.variant.variant.repository_root", lambda: tmp_path)
    made = Checks()
    made.install(monkeypatch)
    return made


def test_the_example_of_the_page_makes_a_checkpoint_and_a_verdict(
    checks: Checks, capsys: pytest.CaptureFixture[str]
) -> None:
    found: dict[str, Any] = {}
    exec(EXAMPLE, found)
    variant, judgement = found["variant"], found["judgement"]
    assert variant.weights.resolve() == found["outcome"].folder.resolve()
    assert (judgement.record.verdict, judgement.record.settings_name) == ("pass", "tinyworld")
    assert {finding.gate for finding in judgement.findings} == judgement.record.verdicts.keys()
    said = capsys.readouterr().out
    assert re.search(r"^quantise_lm_head made ", said, re.MULTILINE)
    assert "engine wrong responses of the served engine, of 9 0.0 0.0 pass" in said

    checks.asked.clear()
    assert [outcome.reused for outcome in api.run_recipe(variant)] == [True]
    assert api.judge(variant).record.verdict == "pass"
    assert checks.asked == []
    assert judgement.record.provenance.command == "slimqwen gate --variant mine --settings tinyworld"


@pytest.mark.usefixtures("checks")
def test_an_expected_failure_is_an_error_with_its_cure() -> None:
    with pytest.raises(RecipeError, match="has no stage calibrate; choose one of quantise_lm_head"):
        api.run_recipe(api.load_variant("mine"), until="calibrate")
    with pytest.raises(EvalError, match="tiny has no baseline; name one"):
        api.judge(api.load_variant("tiny"))
