"""Efficiency of a search: would random search, or one lever at a time, have found as much with as many evaluations?

The recorded trials of a search are a table of points and figures, and every strategy is played on it again: it
proposes a point of the space, and the nearest trial that it has not seen (most levers in common) answers. Trials that
ended before they needed an engine cost nothing. The table is what the search itself chose to look at, so it has more
good points than the space, which flatters random search and one lever at a time.

The search begins with points that its settings name; how much of its worth is theirs shows beside the sampler alone,
which begins with the incumbent.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from pydantic import Field

from slimqwen.records.record import Block, Difference, Estimate, NonNegative, Positive
from slimqwen.stats import intervals

SEEDS = 20

Strategy = Literal["search", "sampler alone", "random", "one lever"]
_PLAYED: tuple[Strategy, ...] = ("search", "sampler alone")
_RIVALS: tuple[Strategy, ...] = ("random", "one lever")

Choice = str | int | float | bool
Point = Mapping[str, Choice]
Choices = Mapping[str, Sequence[Choice]]


@dataclass(frozen=True)
class RecordedTrial:
    """A trial of the table.

    Attributes:
        point: a choice for every lever.
        scores: what the study minimises, the negative speed first; None where the trial ended early.
        meets_budget: whether it could be a finalist; the speed of another is nothing found.
        violations: constraints by name, above 0 where violated.
        needed_engine: whether it costs an evaluation.
    """

    point: Point
    scores: Sequence[float] | None
    meets_budget: bool
    violations: Mapping[str, float]
    needed_engine: bool


class Found(Block):
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
    found: tuple[Found, ...] = Field(min_length=4)
    advantages: tuple[Advantage, ...] = Field(min_length=4)

    @property
    def summary(self) -> str:
        """Whether the search beats the others, in a sentence."""
        said = []
        for name in _PLAYED:
            parts = [
                f"{_relation(each.difference)} {each.over} ({each.difference.value:+.3f} "
                f"[{each.difference.low:+.3f}, {each.difference.high:+.3f}])"
                for each in self.advantages
                if each.strategy == name
            ]
            said.append(
                f"{'its sampler alone' if name == 'sampler alone' else 'the search'} {' and '.join(parts)}"
            )
        return (
            f"Replayed on its {self.trials} trials with {self.evaluations} evaluations, mean over {self.seeds} "
            f"seeds of the best speed found, divided by the incumbent's: {'; '.join(said)}."
        )


def _relation(difference: Difference) -> str:
    return "beats" if difference.low > 0 else "loses to" if difference.high < 0 else "does no better than"


class _Strategy(Protocol):
    def propose(self) -> Point | None:
        """The next point; None where there is none left."""

    def learn(self, trial: RecordedTrial) -> None:
        """Take the trial that answered."""


def compare(
    trials: Sequence[RecordedTrial],
    choices: Choices,
    first_points: Sequence[Point],
    incumbent_speed: float,
    sampler: Callable[[int], Any],
    seeds: int = SEEDS,
) -> Efficiency | None:
    """Play a search, random search and one lever at a time on recorded trials.

    Args:
        trials: recorded trials.
        choices: values of each lever.
        first_points: points that the search begins with; the first, the incumbent's, is where the sampler alone and
            one lever at a time start.
        incumbent_speed: what trials have to beat, in the unit of their negative first score.
        sampler: makes Optuna's sampler of the search for a seed.
        seeds: repetitions of each strategy.

    Returns:
        None where fewer than four trials needed an engine.
    """
    measured = sum(trial.needed_engine for trial in trials)
    evaluations = measured // 2
    if evaluations < 2:
        return None
    known = {
        lever: tuple(dict.fromkeys([*values, *(trial.point[lever] for trial in trials)]))
        for lever, values in choices.items()
    }
    strategies: dict[Strategy, Callable[[int], _Strategy]] = {
        "search": lambda seed: _Search(known, first_points, sampler(seed)),
        "sampler alone": lambda seed: _Search(known, first_points[:1], sampler(seed)),
        "random": lambda seed: _Random(known, seed),
        "one lever": lambda seed: _OneLever(choices, first_points[0], seed),
    }
    with _silent():
        curves = {
            name: [
                _play(make(seed), list(trials), known, evaluations, incumbent_speed) for seed in range(seeds)
            ]
            for name, make in strategies.items()
        }
    best = {name: [curve[evaluations - 1] for curve in of_seed] for name, of_seed in curves.items()}
    return Efficiency(
        seeds=seeds,
        evaluations=evaluations,
        trials=len(trials),
        found=tuple(
            Found(
                strategy=name,
                best=Estimate.of(intervals.mean(best[name])),
                by_evaluations=tuple(sum(column) / seeds for column in zip(*of_seed, strict=True)),
            )
            for name, of_seed in curves.items()
        ),
        advantages=tuple(
            Advantage(
                strategy=name,
                over=other,
                difference=Difference(**vars(intervals.paired_difference(best[other], best[name]))),
            )
            for name in _PLAYED
            for other in _RIVALS
        ),
    )


def _play(
    strategy: _Strategy,
    left: list[RecordedTrial],
    levers: Iterable[str],
    evaluations: int,
    incumbent_speed: float,
) -> list[float]:
    """The best speed over the incumbent's after each evaluation that needs an engine."""
    best = 1.0
    curve: list[float] = []
    while left and len(curve) < evaluations and (point := strategy.propose()) is not None:
        # Of trials as near as each other the first that the search made.
        distances = [sum(trial.point[lever] != point[lever] for lever in levers) for trial in left]
        trial = left.pop(distances.index(min(distances)))
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
        self._study.tell(trial, state=TrialState.FAIL)  # another point answers
        return point

    def learn(self, trial: RecordedTrial) -> None:
        from optuna.trial import TrialState

        self._study.enqueue_trial({lever: trial.point[lever] for lever in self._choices})
        asked, _ = self._ask()
        for name, value in trial.violations.items():
            asked.set_constraint(name, value)
        if trial.scores is None:
            self._study.tell(asked, state=TrialState.PRUNED)
        else:
            self._study.tell(asked, list(trial.scores))

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
        """It learns nothing."""


class _OneLever:
    """A start, then every other value of each lever alone, in an order of its own."""

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
        """It learns nothing."""


@contextmanager
def _silent() -> Iterator[None]:
    """Optuna says nothing of thousands of trials."""
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
