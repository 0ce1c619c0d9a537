"""The check acceptance: what is found before it is measured."""

from pathlib import Path

import pytest

from slimqwen.checkpoint import read_config
from slimqwen.evals.checks import GateSettings, Pair
from slimqwen.evals.checks import acceptance as acceptance_check
from slimqwen.evals.gate import Gate
from slimqwen.evals.invocation import Invocation
from slimqwen.evals.preconditions import find_baseline
from slimqwen.records import store
from slimqwen.text.files import CorpusError
from slimqwen.variant import Variant
from tests.evals.gate_checks import Checks, change_settings, judge


def test_checkpoints_without_an_mtp_head_have_no_drafts_to_compare(
    one: Variant, checks: Checks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptance_check, "has_mtp_head", lambda folder: False)
    path = judge(one)
    record = store.read_record(path, Gate)
    assert (record.verdict, record.verdicts["acceptance"]) == ("pass", "pass")
    assert "acceptance" not in dict(checks.asked)
    assert any("nothing is drafted" in row[1] for row in record.tables(path)[0].rows)


def test_a_variant_that_is_not_made_yet_drafts_if_its_baseline_does(
    one: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = one.with_lines({"VLLM_MODEL": "weights/planned"})
    pair = Pair(planned, find_baseline(planned), Invocation(["x"]))
    check = GateSettings.load("tinyworld", planned.root).checks(pair)["acceptance"]
    assert check.sides == pair.sides

    def has_no_head(folder: Path) -> bool:
        return not read_config(folder)

    monkeypatch.setattr(acceptance_check, "has_mtp_head", has_no_head)
    assert check.sides == ()


def test_a_text_too_short_for_the_prompts_is_found_before_any_check(one: Variant, checks: Checks) -> None:
    change_settings(one, "prompts: 24 ", "prompts: 100000 ")
    with pytest.raises(CorpusError, match=r"tinyworld_passages is used up: 100000 prompts of 32 tokens"):
        judge(one)
    assert checks.asked == []
