"""Efficiency of a search: would random search, or one lever at a time, have found as much with as many evaluations?

The recorded trials of a search are a table of points and figures, on which every strategy is replayed: it proposes a
point of the space, and gets the figures of the nearest trial (most levers in common) that it has not seen. Trials that
ended before they needed an engine cost nothing. The search itself chose the points of the table, so they are better
than those of the space, which favours random search and one lever at a time.

The search begins with points that its settings name; a comparison with the sampler alone, which begins with the
incumbent, shows how much these points contribute.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from pydantic import Field

from slimqwen.records.record import Block, Difference, Estimate, NonNegative, Positive
from slimqwen.search.space import Choice, Point
from slimqwen.stats import intervals

SEEDS = 20

Strategy = Literal["search", "sampler alone", "random", "one lever"]
_SEARCHES: tuple[Strategy, ...] = ("search", "sampler alone")
_RIVALS: tuple[Strategy, ...] = ("random", "one lever")

Choices = Mapping[str, Sequence[Choice]]


@dataclass(frozen=True)
class RecordedTrial:
    """A trial of the table.

    Attributes:
        point: a choice for every lever.
        scores: figures that the study minimises, the negative speed first; None where the trial ended early.
        meets_budget: whether it could be a finalist; only then its speed counts.
        violations: constraints by name, above 0 where violated.
        needed_engine: whether it costs an evaluation.
    """

    point: Point
    scores: Sequence[float] | None
    meets_budget: bool
    violations: Mapping[str, float]
    needed_engine: bool


class StrategyResult(Block):
    """The best that a strategy found: speed over the incumbent's, 1 where nothing better passed."""

    strategy: Strategy
    best: Estimate = Field(description="With as many evaluations as `Efficiency.evaluations`, over seeds.")
    by_evaluations: tuple[NonNegative, ...] = Field(
        description="Mean over seeds after 1, 2, 3, ... evaluations that need an engine."
    )


class Advantage(Block):
    """What one strategy found beyond another, as a difference of speeds over the incumbent's."""

    strategy: Strategy
    over: Strategy
    difference: Difference


class Efficiency(Block):
    """A search, and its sampler alone, against other strategies on its recorded trials."""

    seeds: Positive
    evaluations: Positive = Field(description="That need an engine: half of the recorded ones.")
    trials: Positive = Field(description="Recorded trials that answer.")
    results: tuple[StrategyResult, ...] = Field(
        min_length=4, validation_alias="found", serialization_alias="found"
    )
    advantages: tuple[Advantage, ...] = Field(min_length=4)

    @property
    def summary(self) -> str:
        """Whether the search beats the others, in a sentence."""
        sentences = []
        for name in _SEARCHES:
            parts = [
                f"{_relation(each.difference)} {each.over} ({each.difference.value:+.3f} "
                f"[{each.difference.low:+.3f}, {each.difference.high:+.3f}])"
                for each in self.advantages
                if each.strategy == name
            ]
            sentences.append(
                f"{'its sampler alone' if name == 'sampler alone' else 'the search'} {' and '.join(parts)}"
            )
        return (
            f"Replayed on its {self.trials} trials with {self.evaluations} evaluations, mean over {self.seeds} "
            f"seeds of the best speed found, divided by the incumbent's: {'; '.join(sentences)}."
        )


def _relation(difference: Difference) -> str:
    return "beats" if difference.low > 0 else "loses to" if difference.high < 0 else "does no better than"


class _Strategy(Protocol):
    def propose(self) -> Point | None:
        """The next point; None where none is left."""

    def learn(self, trial: RecordedTrial) -> None:
        """Take in the trial that gave the figures."""


def compare(
    trials: Sequence[RecordedTrial],
    choices: Choices,
    first_points: Sequence[Point],
    incumbent_speed: float,
    sampler: Callable[[int], Any],
    seeds: int = SEEDS,
) -> Efficiency | None:
    """Replay a search, its sampler alone, random search and one lever at a time on recorded trials.

    Args:
        trials: recorded trials.
        choices: values of each lever.
        first_points: points that the search begins with; the first, the incumbent's, is where the sampler alone and
            one lever at a time start.
        incumbent_speed: speed that trials have to beat, in the unit of their negative first score.
        sampler: makes Optuna's sampler of the search for a seed.
        seeds: repetitions of each strategy.

    Returns:
        None where fewer than four trials needed an engine.
    """
    measured = sum(trial.needed_engine for trial in trials)
    evaluations = measured // 2
    if evaluations < 2:
        return None
    lever_values = {
        lever: tuple(dict.fromkeys([*values, *(trial.point[lever] for trial in trials)]))
        for lever, values in choices.items()
    }
    strategies: dict[Strategy, Callable[[int], _Strategy]] = {
        "search": lambda seed: _Search(lever_values, first_points, sampler(seed)),
        "sampler alone": lambda seed: _Search(lever_values, first_points[:1], sampler(seed)),
        "random": lambda seed: _Random(lever_values, seed),
        "one lever": lambda seed: _OneLever(choices, first_points[0], seed),
    }
    with _silenced_optuna():
        curves = {
            name: [
                _replay(make(seed), list(trials), lever_values, evaluations, incumbent_speed)
                for seed in range(seeds)
            ]
            for name, make in strategies.items()
        }
    best = {name: [curve[evaluations - 1] for curve in seed_curves] for name, seed_curves in curves.items()}
    return Efficiency(
        seeds=seeds,
        evaluations=evaluations,
        trials=len(trials),
        results=tuple(
            StrategyResult(
                strategy=name,
                best=Estimate.from_estimate(intervals.mean(best[name])),
                by_evaluations=tuple(sum(column) / seeds for column in zip(*seed_curves, strict=True)),
            )
            for name, seed_curves in curves.items()
        ),
        advantages=tuple(
            Advantage(
                strategy=name,
                over=other,
                difference=Difference(**vars(intervals.paired_difference(best[other], best[name]))),
            )
            for name in _SEARCHES
            for other in _RIVALS
        ),
    )


def _replay(
    strategy: _Strategy,
    unseen: list[RecordedTrial],
    levers: Iterable[str],
    evaluations: int,
    incumbent_speed: float,
) -> list[float]:
    """The best speed over the incumbent's after each evaluation that needs an engine."""
    best = 1.0
    curve: list[float] = []
    while unseen and len(curve) < evaluations and (point := strategy.propose()) is not None:
        # Of equally near trials the one that the search made first.
        distances = [sum(trial.point[lever] != point[lever] for lever in levers) for trial in unseen]
        trial = unseen.pop(distances.index(min(distances)))
        strategy.learn(trial)
        if trial.scores is not None and trial.meets_budget:
            best = max(best, -trial.scores[0] / incumbent_speed)
        if trial.needed_engine:
            curve.append(best)
    return curve + [best] * (evaluations - len(curve))


class _Search:
    """The study of a search: its first points, then its sampler."""

    def __init__(self, choices: Choices, first_points: Sequence[Point], sampler: Any) -> None:
        import optuna

        self._choices, self._first = choices, list(first_points)
        self._study = optuna.create_study(directions=["minimize"] * 3, sampler=sampler)

    def propose(self) -> Point | None:
        from optuna.trial import TrialState

        if self._first:
            return self._first.pop(0)
        trial, point = self._ask()
        self._study.tell(trial, state=TrialState.FAIL)  # the sampler gets the nearest recorded point instead
        return point

    def learn(self, trial: RecordedTrial) -> None:
        from optuna.trial import TrialState

        self._study.enqueue_trial({lever: trial.point[lever] for lever in self._choices})
        study_trial, _ = self._ask()
        for name, value in trial.violations.items():
            study_trial.set_constraint(name, value)
        if trial.scores is None:
            self._study.tell(study_trial, state=TrialState.PRUNED)
        else:
            self._study.tell(study_trial, list(trial.scores))

    def _ask(self) -> tuple[Any, Point]:
        trial = self._study.ask()
        return trial, {
            lever: trial.suggest_categorical(lever, list(values)) for lever, values in self._choices.items()
        }


class _Random:
    """Points drawn evenly from the space."""

    def __init__(self, choices: Choices, seed: int) -> None:
        self._choices, self._rng = choices, random.Random(seed)

    def propose(self) -> Point | None:
        return {lever: self._rng.choice(values) for lever, values in self._choices.items()}

    def learn(self, trial: RecordedTrial) -> None:
        """Learn nothing."""


class _OneLever:
    """A start point, then every other value of each lever alone, in random order."""

    def __init__(self, choices: Choices, start: Point, seed: int) -> None:
        moves = [
            {**start, lever: value}
            for lever, values in choices.items()
            for value in values
            if value != start[lever]
        ]
        random.Random(seed).shuffle(moves)
        self._points = iter([start, *moves])

    def propose(self) -> Point | None:
        return next(self._points, None)

    def learn(self, trial: RecordedTrial) -> None:
        """Learn nothing."""


@contextmanager
def _silenced_optuna() -> Iterator[None]:
    """Keep Optuna from logging thousands of trials."""
    import warnings

    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        optuna.logging.set_verbosity(before)
