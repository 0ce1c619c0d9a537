"""The study: where candidates end, what is not measured twice, and that an interrupted one goes on."""

import pytest

from slimqwen.search.ladder import Ladder
from slimqwen.search.record import SearchTrial
from slimqwen.search.rungs import Budget
from slimqwen.search.study import Findings, Study
from tests.search.recorded_rungs import RecordedRungs

TRIALS = 24


def run(
    ladder: Ladder, executor: RecordedRungs | None = None, trials: int = TRIALS, width: int = 1
) -> Findings:
    folder = ladder.overlay.parent
    study = Study(ladder, executor or RecordedRungs(ladder.base.root), folder, folder / "search.log")
    return study.run(trials, width=width)


def test_every_candidate_ends_at_the_rung_that_it_cannot_pass(ladder: Ladder) -> None:
    found = run(ladder)
    assert len(found.trials) == TRIALS
    assert found.incumbent.variant == "tiny-classic"
    by_rung: dict[str, list[SearchTrial]] = {}
    for trial in found.trials:
        by_rung.setdefault(trial.rung if trial.reason else "passed", []).append(trial)
    assert by_rung.keys() == {"roofline", "fidelity", "acceptance", "passed"}
    assert all(t.kl_nats is None and t.seconds == 0 for t in by_rung["roofline"])
    assert all(t.crashed or t.fidelity_share > 1 for t in by_rung["fidelity"])
    assert all(t.acceptance_share.high < 0.97 for t in by_rung["acceptance"])
    assert all(t.fidelity_share <= 1.1 and t.tokens_per_second > 0 for t in by_rung["passed"])


@pytest.mark.parametrize("meeting", [True, False])
def test_only_a_candidate_that_could_be_a_finalist_ends_slower_ones(
    ladder: Ladder, monkeypatch: pytest.MonkeyPatch, meeting: bool
) -> None:
    monkeypatch.setattr(Budget, "is_met_by", lambda _, trial: meeting and trial.passed)
    found = run(ladder, trials=40)
    least = found.incumbent.tokens_per_second
    ended = 0
    for trial in found.trials:
        if trial.rung == "roofline":
            assert trial.bound_tokens_per_second < least
            ended += 1
        elif ladder.budget.is_met_by(trial):
            least = max(least, 0.9 * (trial.tokens_per_second or 0))
    assert ended or not meeting
    assert (least == found.incumbent.tokens_per_second) == (not meeting)


def test_a_candidate_that_crashes_has_its_reason_and_no_score(ladder: Ladder) -> None:
    crashed = [trial for trial in run(ladder).trials if trial.crashed]
    assert crashed
    for trial in crashed:
        assert trial.rung == "fidelity"
        assert trial.changes["linear_attention"] == "W4A16"
        assert trial.reason == "its process died (SIGSEGV)"
        assert not trial.passed
        assert trial.tokens_per_second is None


def test_a_crash_while_drafts_are_counted_is_of_that_rung(ladder: Ladder) -> None:
    executor = RecordedRungs(ladder.base.root)
    executor.broken = "acceptance of tiny-"
    ended = [trial for trial in run(ladder, executor).trials if trial.rung == "acceptance"]
    assert ended
    assert all(trial.crashed and trial.tokens_per_second is None for trial in ended)


@pytest.mark.parametrize("width", [1, 3])
def test_no_candidate_is_measured_twice(ladder: Ladder, width: int) -> None:
    executor = RecordedRungs(ladder.base.root)
    found = run(ladder, executor, width=width)
    assert len({trial.name for trial in found.trials}) == len(found.trials) == TRIALS
    # The distributions of a target are those of all its candidates, also of those that wait for the same task.
    targets = [task.key.split("-search-")[0] for task in executor.ran]
    assert len(targets) == len(set(targets))


def test_a_finished_study_is_answered_without_a_task(ladder: Ladder) -> None:
    first = run(ladder)
    again = RecordedRungs(ladder.base.root)
    assert run(ladder, again) == first
    assert again.ran == []


def test_a_study_that_was_interrupted_ends_as_one_that_was_not(ladder: Ladder) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(ladder, RecordedRungs(ladder.base.root, interrupt_after=7))
    rest = RecordedRungs(ladder.base.root)
    resumed = run(ladder, rest)
    (ladder.overlay.parent / "study.log").unlink()
    (ladder.overlay.parent / "answers.jsonl").unlink()
    whole = RecordedRungs(ladder.base.root)
    names = {trial.name for trial in run(ladder, whole).trials}
    assert len(rest.ran) == len(whole.ran) - 7
    assert {trial.name for trial in resumed.trials} == names


def test_more_trials_go_on_from_those_that_are_known(ladder: Ladder) -> None:
    few = run(ladder, trials=10)
    more = run(ladder, trials=14)
    assert more.trials[:10] == few.trials
    assert len(more.trials) == 14


def test_speed_is_explained_by_levers(ladder: Ladder) -> None:
    found = run(ladder, trials=40)
    assert found.importance
    assert set(found.importance) <= set(ladder.space.levers)
    assert sum(found.importance.values()) == pytest.approx(1)
