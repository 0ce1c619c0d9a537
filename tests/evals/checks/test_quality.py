"""The check quality: a sample or all items, and responses that run away."""

from pathlib import Path

import pytest

from slimqwen import variant
from slimqwen.evals import quality
from slimqwen.evals.gate import Gate
from slimqwen.evals.suites.suite import Suite
from slimqwen.records import store
from slimqwen.variant import Variant
from tests.evals.gate_checks import Checks, change_settings, judge


@pytest.mark.parametrize(("count", "verdict"), [(0, "pass"), (3, "inconclusive"), (20, "fail")])
def test_responses_that_run_away_are_judged_beside_right_answers(
    one: Variant, checks: Checks, count: int, verdict: str
) -> None:
    change_settings(one, "runaway_share: 0.01,", "runaway_share: 0.012,")
    checks.runaways = count
    path = judge(one)
    record = store.read_record(path, Gate)
    assert (record.verdicts["quality"], record.verdict) == (verdict, verdict)
    (row,) = [row for row in record.tables(path)[0].rows if "run away" in row[1]]
    assert row[-1] == verdict
    planned = f"{row[1]}: "
    assert any(note.startswith(planned) for note in record.tables(path)[0].notes) == (
        verdict == "inconclusive"
    )


def test_the_page_says_how_many_items_were_planned_to_decide(one: Variant, checks: Checks) -> None:
    checks.right = 192
    path = judge(one)
    (finding,) = (each for each in store.read_items(path) if each.get("items_needed"))
    (task,) = Suite.load("tinyworld", one.root).tasks
    planned = task.items_to_decide
    assert (finding["verdict"], finding["items_needed"]) == ("inconclusive", planned)
    notes = store.read_record(path, Gate).tables(path)[0].notes
    assert f"{finding['figure']}: {planned:,} items were planned to decide." in notes


def test_where_a_sample_cannot_tell_the_gate_goes_on_with_all_items(one: Variant, checks: Checks) -> None:
    checks.right = 192
    record = store.read_record(judge(one), Gate)
    assert [name for check, name in checks.asked if check == "quality"] == ["tiny", "small", "tiny", "small"]
    scores = [path for path in record.evidence(one.root / "experiments") if path.name.startswith("quality_")]
    assert [store.read_record(path, quality.Quality).limit for path in scores] == [None, None]
    checks.asked.clear()
    judge(one)
    assert checks.asked == []


def test_where_the_sample_was_of_all_items_none_is_asked_again(one: Variant, checks: Checks) -> None:
    checks.right, checks.available = 192, 400
    record = store.read_record(judge(one), Gate)
    assert record.verdicts["quality"] == "inconclusive"
    assert [name for check, name in checks.asked if check == "quality"] == ["tiny", "small"]


def test_where_a_sample_fails_the_other_items_are_not_asked(one: Variant, checks: Checks) -> None:
    checks.right = 100
    judge(one)
    assert [name for check, name in checks.asked if check == "quality"] == ["tiny", "small"]


def test_a_sample_by_other_assumptions_is_taken_anew(
    one: Variant, checks: Checks, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge(one)
    checks.asked.clear()
    load = Suite.load

    def stricter(name: str, root: Path) -> Suite:
        suite = load(name, root)
        (task,) = store.read_record(store.latest(one.folder, quality.Quality), quality.Quality).tasks
        renamed = suite.tasks[0].model_copy(update={"name": task, "assumed_discordance": 0.05})
        return suite.model_copy(update={"tasks": [renamed]})

    monkeypatch.setattr(Suite, "load", staticmethod(stricter))
    judge(one)
    assert checks.asked == [("quality", "tiny"), ("quality", "small")]


def test_all_items_speak_before_a_sample_where_both_have_them(one: Variant, checks: Checks) -> None:
    suite = Suite.load("tinyworld", one.root)
    whole = [checks.quality(side, suite, limit=None) for side in (variant.load("tiny", one.root), one)]
    record = store.read_record(judge(one))
    assert {f"{path.parent.name}/{path.name}" for path in whole} <= set(record.records)
    assert [asked for asked in checks.asked if asked[0] == "quality"] == [
        ("quality", "tiny"),
        ("quality", "small"),
    ]
