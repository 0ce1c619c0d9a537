"""The study: where candidates end, what is not measured twice, and that an interrupted one goes on."""

import dataclasses

import pytest

from slimqwen.search import SearchError
from slimqwen.search.ladder import Ladder
from slimqwen.search.record import SearchTrial
from slimqwen.search.rungs import Budget
from slimqwen.search.space import Space
from slimqwen.search.study import Study
from tests.search.recorded_rungs import RecordedRungs

TRIALS = 24


def open_study(ladder: Ladder, executor: RecordedRungs | None = None) -> Study:
    folder = ladder.overlay.parent
    return Study(ladder, executor or RecordedRungs(ladder.base.root), folder, folder / "search.log")


def run(
    ladder: Ladder, executor: RecordedRungs | None = None, trials: int = TRIALS, width: int = 1
) -> list[SearchTrial]:
    return open_study(ladder, executor).run(trials, width=width)


def test_every_candidate_ends_at_the_rung_that_it_cannot_pass(ladder: Ladder) -> None:
    study = open_study(ladder)
    trials = study.run(TRIALS)
    assert len(trials) == TRIALS
    assert study.incumbent.variant == "tiny-classic"
    # Every position is kept with 0.9 of the one before.
    assert study.incumbent.acceptance_length.value == pytest.approx(
        1 + sum(0.9**n for n in range(1, 5)), abs=0.02
    )
    by_rung: dict[str, list[SearchTrial]] = {}
    for trial in trials:
        by_rung.setdefault(trial.rung if trial.reason else "passed", []).append(trial)
    assert by_rung.keys() == {"roofline", "fidelity", "acceptance", "passed"}
    assert all(t.kl_nats is None and t.seconds == 0 for t in by_rung["roofline"])
    assert all(t.crashed or t.fidelity_share > 1 for t in by_rung["fidelity"])
    assert all(t.acceptance_share.high < 0.97 for t in by_rung["acceptance"])
    assert all(t.fidelity_share <= 1.1 and t.tokens_per_second > 0 for t in by_rung["passed"])


def test_the_sampler_learns_how_far_a_candidate_is_beyond_its_limits(ladder: Ladder) -> None:
    study = open_study(ladder)
    known = {trial.number: trial for trial in study.run(TRIALS)}
    told = {each.number: each.constraints["excess"] for each in study._study.trials if each.constraints}
    assert told.keys() == known.keys()
    for number, trial in known.items():
        assert (told[number] <= 0) == ladder.budget.is_met_by(trial)
        if trial.crashed:
            assert told[number] == max(told.values())
        elif trial.rung == "acceptance" and trial.reason:
            assert told[number] == pytest.approx(1 - trial.acceptance_share.value)
        elif trial.rung != "roofline" and told[number] > 0:
            assert told[number] == pytest.approx(max(0, trial.worst_share - 1), abs=1e-6)
    passed = next(trial for trial in known.values() if trial.passed)
    assert study._excess(passed.model_copy(update={"worst_share": 1.5})) == pytest.approx(0.5)


@pytest.mark.parametrize("meeting", [True, False])
def test_only_a_candidate_that_could_be_a_finalist_ends_slower_ones(
    ladder: Ladder, monkeypatch: pytest.MonkeyPatch, meeting: bool
) -> None:
    monkeypatch.setattr(Budget, "is_met_by", lambda _, trial: meeting and trial.passed)
    study = open_study(ladder)
    trials = study.run(40)
    least = study.incumbent.tokens_per_second
    ended = 0
    for trial in trials:
        if trial.rung == "roofline":
            assert trial.bound_tokens_per_second < least
            ended += 1
        elif ladder.budget.is_met_by(trial):
            least = max(least, 0.9 * (trial.tokens_per_second or 0))
    assert ended or not meeting
    assert (least == study.incumbent.tokens_per_second) == (not meeting)


def test_a_candidate_that_crashes_has_its_reason_and_no_score(ladder: Ladder) -> None:
    crashed = [trial for trial in run(ladder) if trial.crashed]
    assert crashed
    for trial in crashed:
        assert trial.rung == "fidelity"
        assert trial.changes["linear_attention"] == "W4A16"
        assert trial.reason == "its process died (SIGSEGV)"
        assert not trial.passed
        assert trial.tokens_per_second is None


def test_a_crash_while_acceptance_is_measured_is_of_that_rung(ladder: Ladder) -> None:
    executor = RecordedRungs(ladder.base.root)
    executor.broken = "acceptance of tiny-search-"
    ended = [trial for trial in run(ladder, executor) if trial.rung == "acceptance"]
    assert ended
    assert all(trial.crashed and trial.tokens_per_second is None for trial in ended)


@pytest.mark.parametrize("width", [1, 3])
def test_no_candidate_is_measured_twice(ladder: Ladder, width: int) -> None:
    executor = RecordedRungs(ladder.base.root)
    trials = run(ladder, executor, width=width)
    assert len({trial.name for trial in trials}) == len(trials) == TRIALS
    # The distributions of a target are those of all its candidates, also of those that wait for the same task.
    keys = [task.key for task in executor.ran]
    assert len(keys) == len(set(keys))


def test_a_finished_study_is_answered_without_a_task(ladder: Ladder) -> None:
    first = run(ladder)
    again = RecordedRungs(ladder.base.root)
    assert run(ladder, again) == first
    assert again.ran == []


def test_a_study_that_was_interrupted_goes_on(ladder: Ladder) -> None:
    first = RecordedRungs(ladder.base.root, interrupt_after=7)
    with pytest.raises(KeyboardInterrupt):
        run(ladder, first, width=2)
    rest = RecordedRungs(ladder.base.root)
    trials = run(ladder, rest, width=2)
    assert len(trials) == len({trial.name for trial in trials}) == TRIALS
    assert not {task.key for task in first.ran} & {task.key for task in rest.ran}
    # What was under way is tried first.
    under_way = {task.argument.variant for task in first.waiting}
    assert under_way <= {task.argument.variant for task in rest.ran[:3]}


def test_more_trials_go_on_from_those_that_are_known(ladder: Ladder) -> None:
    few = run(ladder, trials=10)
    more = run(ladder, trials=14)
    assert more[:10] == few
    assert len(more) == 14


def test_no_trial_is_begun_after_the_time(ladder: Ladder) -> None:
    executor = RecordedRungs(ladder.base.root)
    assert open_study(ladder, executor).run(TRIALS, seconds=0) == []
    assert {task.argument.variant for task in executor.ran} == {"tiny", "tiny-classic"}


def test_a_space_of_one_point_ends_the_study(ladder: Ladder) -> None:
    point = ladder.space.complete(ladder.space.settings.incumbent.point)
    choices = {**{name: (value,) for name, value in point.items()}, "mlp": ("none", point["mlp"])}
    settings = ladder.space.settings.model_copy(update={"points": ()})
    small = dataclasses.replace(ladder, space=Space(choices, settings))
    assert len(run(small)) == 2


def test_a_base_that_cannot_be_measured_ends_the_search(ladder: Ladder) -> None:
    executor = RecordedRungs(ladder.base.root)
    executor.broken = "acceptance of tiny"
    with pytest.raises(SearchError, match=r"acceptance of tiny.*: its process died \(SIGSEGV\)"):
        run(ladder, executor)
