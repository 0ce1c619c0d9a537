"""The shortlist: a second count on more prompts decides which candidates are proven."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slimqwen.records.journal import locked
from slimqwen.search.candidate import Candidate
from slimqwen.search.executors import Failure, Outcome, Result, Task
from slimqwen.search.ladder import Ladder
from slimqwen.search.record import Ratio, SearchTrial
from slimqwen.search.shortlist import recount
from tests.search.recorded_rungs import RecordedRungs
from tests.search.trials import trial

TRIALS = [
    trial(
        number,
        name=f"trial-{number}",
        changes=changes,
        worst_share=0.5,
        acceptance_share=Ratio(value=1.0, low=0.99, high=1.01) if "depth" in changes else None,
    )
    for number, changes in enumerate(
        (
            {"mlp": "W4A16", "depth": 2},
            {"mlp": "W8A16", "depth": 3},
            {"mlp": "W8A16", "attention": "W8A16", "depth": 4},
            {"mlp": "W8A16", "attention": "W8A16", "depth": 1},
            {"mlp": "W4A16"},
        )
    )
]
"""Trials that passed; those that draft keep all of the base's acceptance length."""

Count = Callable[..., list[SearchTrial]]
"""count(trials, rungs, finalists): `recount`."""


class SecondCounts(RecordedRungs):
    """Rungs whose second counts differ for some schemes of the MLPs.

    Attributes:
        outcomes: share of the drafts that is accepted, or why the count broke down, by scheme.
    """

    def __init__(self, root: Path, outcomes: dict[str, float | str]) -> None:
        super().__init__(root)
        self.outcomes = outcomes

    def outcome(self, task: Task) -> Outcome:
        outcome = super().outcome(task)
        folder = self.root / task.argument["overlay"] / "experiments" / task.argument["candidate"]
        recipe = folder / "recipe.yaml"
        text = recipe.read_text() if recipe.is_file() else ""
        for scheme, changed in self.outcomes.items():
            if f"mlp: {scheme}" in text and isinstance(outcome, Result):
                if isinstance(changed, str):
                    return Failure(outcome.key, changed)
                for item in outcome.value:
                    item["accepted_per_position"] = [
                        round(changed * count) for count in item["accepted_per_position"]
                    ]
        return outcome


@pytest.fixture
def count(ladder: Ladder, small_root: Path) -> Iterator[Count]:
    with locked(small_root / "answers.jsonl") as answers:
        yield lambda trials, rungs, finalists: recount(trials, ladder, rungs, answers, finalists=finalists)


def test_the_first_that_are_likely_proven_are_enough(ladder: Ladder, count: Count) -> None:
    rungs = SecondCounts(ladder.base.root, {})
    counted = count(TRIALS, rungs, 2)
    assert [trial.name for trial in counted] == ["trial-0", "trial-1"]
    assert {each.recounted_share for each in counted} == {Ratio(value=1.0, low=1.0, high=1.0)}
    assert len(rungs.ran) == 3  # the base once
    assert {task.argument["prompts"] for task in rungs.ran} == {ladder.budget.acceptance.proof_prompts}


def test_a_worse_second_count_makes_room_for_the_next(ladder: Ladder, count: Count) -> None:
    counted = count(TRIALS, SecondCounts(ladder.base.root, {"W4A16": 0.9}), 1)
    assert [trial.name for trial in counted] == ["trial-0", "trial-1"]
    shares = [trial.recounted_share for trial in counted]
    assert shares[0] is not None
    assert shares[0].value < 0.97
    assert [ladder.budget.is_likely_proven(trial, 1) for trial in counted] == [False, True]


def test_a_candidate_whose_count_breaks_down_is_no_finalist(ladder: Ladder, count: Count) -> None:
    rungs = SecondCounts(ladder.base.root, {"W4A16": "its process died (SIGSEGV)"})
    assert [trial.name for trial in count(TRIALS, rungs, 1)] == ["trial-1"]


def test_candidates_with_the_same_drafts_share_a_count_and_a_second_run_needs_none(
    ladder: Ladder, count: Count
) -> None:
    rungs = SecondCounts(ladder.base.root, {})
    first = count(TRIALS[2:4], rungs, 2)
    assert len(rungs.ran) == 2  # the base and one candidate
    second = RecordedRungs(ladder.base.root)
    assert count(TRIALS[2:4], second, 2) == first
    assert second.ran == []


def test_a_candidate_without_drafts_needs_no_count(ladder: Ladder, count: Count) -> None:
    assert not Candidate(**TRIALS[4].changes).depth
    rungs = SecondCounts(ladder.base.root, {})
    assert count(TRIALS[4:], rungs, 1) == TRIALS[4:]
    assert rungs.ran == []
