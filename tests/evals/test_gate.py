"""The gate: which checks it runs, and its verdict; each check has tests of its own."""

from typing import Any

import pytest

from slimqwen import variant
from slimqwen.evals import EvalError, gate
from slimqwen.evals.gate import Gate
from slimqwen.records import store
from slimqwen.records.settings import SettingsError
from slimqwen.variant import Variant
from tests.evals.gate_checks import Checks, judge


def test_four_checks_make_one_verdict_and_one_page(one: Variant, checks: Checks) -> None:
    path = judge(one)
    record = store.read_record(path, Gate)
    assert record.verdict == "pass"
    assert record.verdicts == dict.fromkeys(("fidelity", "acceptance", "quality", "engine"), "pass")
    assert checks.asked == [
        ("fidelity", "small"), ("acceptance", "tiny"), ("acceptance", "small"),
        ("quality", "tiny"), ("quality", "small"), ("engine", "small"),
    ]  # fmt: skip
    assert len(record.records) == 6
    assert all((one.root / "experiments" / name).is_file() for name in record.records)
    page = record.tables(path)[0]
    assert page.title == "Gate of small against tiny: pass"
    assert {row[0] for row in page.rows} == set(record.verdicts)
    assert page.columns[: page.text_columns] == ("check", "figure")


@pytest.mark.parametrize(
    ("damage", "check", "verdict"),
    [
        ({"kl_nats": 0.5}, "fidelity", "fail"),
        ({"noise_ratio": 2.1}, "fidelity", "fail"),
        ({"accepted": 4}, "acceptance", "fail"),
        ({"right": 100}, "quality", "fail"),
        ({"right": 192}, "quality", "inconclusive"),
        ({"engine_is": "wrong"}, "engine", "fail"),
        ({"engine_is": "dead"}, "engine", "fail"),
        ({"engine_is": "idle"}, "engine", "inconclusive"),
    ],
)
def test_one_check_decides(
    one: Variant, checks: Checks, damage: dict[str, Any], check: str, verdict: str
) -> None:
    vars(checks).update(damage)
    record = store.read_record(judge(one), Gate)
    assert record.verdict == verdict
    assert {name: each for name, each in record.verdicts.items() if each != "pass"} == {check: verdict}


def test_the_p_value_of_a_gate_is_that_of_its_weakest_figure(one: Variant, checks: Checks) -> None:
    path = judge(one)
    p_values = [item["p_value"] for item in store.read_items(path) if item.get("p_value") is not None]
    assert 0 < gate.gate_p_value(path) == max(p_values) < 0.025
    checks.engine_is = "wrong"
    settings = one.folder / "config.env"
    settings.write_text(settings.read_text() + "VLLM_MAX_NUM_SEQS=3\n")
    failed = judge(one)
    assert gate.gate_p_value(failed) == 1


def test_limits_that_change_after_a_verdict_are_named(one: Variant, checks: Checks) -> None:
    first = store.read_record(judge(one), Gate)
    assert (first.changed_limits, first.caution) == ((), "")
    checks.margin = 0.08
    settings = one.folder.parent / "tiny" / "config.env"  # small inherits it: both sides are measured again
    settings.write_text(settings.read_text() + "VLLM_MAX_NUM_SEQS=3\n")
    path = judge(one)
    second = store.read_record(path, Gate)
    (change,) = second.changed_limits
    assert change.endswith(": 0.04 at first, 0.08 now")
    assert any(change in note for note in second.tables(path)[0].notes)


def test_a_variant_without_a_baseline_is_refused(one: Variant) -> None:
    with pytest.raises(EvalError, match="tiny has no baseline"):
        judge(variant.load("tiny", one.root))
    with pytest.raises(SettingsError, match=r"eval/gates/nope.yaml"):
        judge(one, "nope")
