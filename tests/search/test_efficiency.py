"""Search against random search and one lever at a time, on tables whose best point is known."""

import itertools
from collections.abc import Callable

import optuna
import pytest

from slimqwen.search import efficiency
from slimqwen.search.efficiency import Efficiency, Point, RecordedTrial

CHOICES = dict.fromkeys("abcd", (0, 1, 2, 3))
START: Point = dict.fromkeys(CHOICES, 0)


def sampler(seed: int) -> object:
    return optuna.samplers.TPESampler(seed=seed, n_startup_trials=8, multivariate=True)


def table(
    speed: Callable[[Point], float], passes: Callable[[Point], bool] = lambda point: True
) -> list[RecordedTrial]:
    """Every point of the space; slower ones than the start end before they need an engine."""
    rows = []
    for values in itertools.product(*CHOICES.values()):
        point = dict(zip(CHOICES, values, strict=True))
        if speed(point) < speed(START):
            rows.append(RecordedTrial(point, None, False, {"roofline": 0.5}, False))
        elif passes(point):
            rows.append(RecordedTrial(point, (-speed(point), 0.5, 1.0), True, {"limits": -1.0}, True))
        else:
            rows.append(RecordedTrial(point, None, False, {"fidelity": 0.5}, True))
    return rows


def played(rows: list[RecordedTrial], seeds: int = 6) -> Efficiency:
    found = efficiency.compare(rows, CHOICES, [START], 100.0, sampler, seeds=seeds)
    assert found is not None
    return found


def curve(found: Efficiency, strategy: str) -> tuple[float, ...]:
    (row,) = (each for each in found.results if each.strategy == strategy)
    return row.by_evaluations


def test_where_levers_act_together_search_beats_one_lever_at_a_time_and_random_search() -> None:
    """A ridge: only points with equal levers are fast, so no lever alone leaves the start."""

    def speed(point: Point) -> float:
        values = [int(value) for value in point.values()]
        return 100.0 + 10 * sum(values) - 4 * (max(values) - min(values)) * (sum(values) < 9)

    found = played(table(speed))
    search, grid, drawn = (curve(found, name) for name in ("search", "one lever", "random"))
    assert search[-1] == pytest.approx(2.2)
    assert grid[-1] < 1.5
    assert sum(search[:40]) > sum(drawn[:40])
    over = {(each.strategy, each.over): each.difference for each in found.advantages}
    assert over["sampler alone", "one lever"].low > 0
    assert found.summary.endswith(
        f"[{over['sampler alone', 'one lever'].low:+.3f}, {over['sampler alone', 'one lever'].high:+.3f}])."
    )
    assert "its sampler alone" in found.summary
    assert "beats one lever" in found.summary
    # Its first points are all that tells the two apart, and here they are the same.
    assert curve(found, "sampler alone") == search


def test_what_the_settings_knew_before_is_told_apart_from_the_sampler() -> None:
    best: Point = {**START, "a": 3, "b": 3}
    rows = table(lambda point: 100.0 + 10 * (point == best) + int(point["c"]))
    found = efficiency.compare(rows, CHOICES, [START, best], 100.0, sampler, seeds=4)
    assert found is not None
    assert curve(found, "search")[1] == pytest.approx(1.1)
    assert curve(found, "sampler alone")[1] < 1.1


def test_a_trial_that_could_be_no_finalist_counts_for_no_strategy() -> None:
    fast = [
        RecordedTrial({**START, "a": value}, (-100.0 - value, 1.2, 1.0), False, {"limits": -1.0}, True)
        for value in range(4)
    ]
    found = efficiency.compare(fast, CHOICES, [START], 100.0, sampler, seeds=2)
    assert found is not None
    assert {value for row in found.results for value in row.by_evaluations} == {1.0}


def test_where_one_lever_is_enough_the_record_says_that_search_is_no_better() -> None:
    found = played(table(lambda point: 100.0 + 10 * int(point["a"])))
    assert [each.best.value for each in found.results] == pytest.approx([1.3] * 4)
    assert {(each.difference.value, each.difference.low) for each in found.advantages} == {(0.0, 0.0)}
    assert found.summary.count("does no better than") == 4


def test_what_ended_early_costs_nothing_and_what_failed_counts_for_nothing() -> None:
    def speed(point: Point) -> float:
        return 100.0 + 10 * int(point["a"]) - 50 * (point["b"] == 3)

    rows = table(speed, passes=lambda point: point["a"] != 3)
    found = played(rows, seeds=2)
    assert found.trials == len(rows) == 256
    assert found.evaluations == sum(row.needed_engine for row in rows) // 2 == 104 - 8
    assert {len(row.by_evaluations) for row in found.results} == {found.evaluations}
    assert max(row.by_evaluations[-1] for row in found.results) == pytest.approx(1.2)
    assert all(list(row.by_evaluations) == sorted(row.by_evaluations) for row in found.results)


def test_a_few_trials_compare_nothing() -> None:
    rows = table(lambda point: 100.0)[:3]
    assert efficiency.compare(rows, CHOICES, [START], 100.0, sampler) is None
