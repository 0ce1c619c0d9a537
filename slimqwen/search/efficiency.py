"""Efficiency of a search: would random search, or one lever at a time, have found as much with as many evaluations?

The recorded trials of a search are a table of points and figures, on which every strategy is replayed: it proposes a
point of the space, and gets the figures of the nearest trial (most levers in common) that it has not seen. Trials that
ended before they needed an engine cost nothing. The search itself chose the points of the table, so they are better
than those of the space, which favours random search and one lever at a time.

The search begins with points that its settings name; a comparison with the sampler alone, which begins with the
incumbent, shows how much these points contribute.
"""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

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


Seen = list[RecordedTrial]
"""The trials that answered the points of a strategy so far, in their order."""


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
        first_points: points that the search begins with; the first, the incumbent's, is where the sampler alone and
            one lever at a time start.
        incumbent_speed: speed that trials have to beat, in the unit of their negative first score.
        sampler: makes Optuna's sampler of the search for a seed.

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
    strategies: dict[Strategy, Callable[[int, Seen], Iterator[Point]]] = {
        "search": lambda seed, seen: _search(lever_values, first_points, sampler(seed), seen),
        "sampler alone": lambda seed, seen: _search(lever_values, first_points[:1], sampler(seed), seen),
        "random": lambda seed, _: _random(lever_values, seed),
        "one lever": lambda seed, _: _one_lever(choices, first_points[0], seed),
    }
    curves: dict[Strategy, list[list[float]]] = {name: [] for name in strategies}
    with _silenced_optuna():
        for name, propose in strategies.items():
            for seed in range(seeds):
                seen: Seen = []
                points = propose(seed, seen)
                curves[name].append(_replay(points, seen, trials, lever_values, evaluations, incumbent_speed))
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
    points: Iterator[Point],
    seen: Seen,
    trials: Sequence[RecordedTrial],
    levers: Iterable[str],
    evaluations: int,
    incumbent_speed: float,
) -> list[float]:
    """The best speed over the incumbent's after each evaluation that needs an engine."""
    best = 1.0
    curve: list[float] = []
    unseen = list(trials)
    while unseen and len(curve) < evaluations and (point := next(points, None)) is not None:
        # Of equally near trials the one that the search made first.
        distances = [sum(trial.point[lever] != point[lever] for lever in levers) for trial in unseen]
        trial = unseen.pop(distances.index(min(distances)))
        seen.append(trial)
        if trial.scores is not None and trial.meets_budget:
            best = max(best, -trial.scores[0] / incumbent_speed)
        if trial.needed_engine:
            curve.append(best)
    return curve + [best] * (evaluations - len(curve))


def _search(choices: Choices, first_points: Sequence[Point], sampler: Any, seen: Seen) -> Iterator[Point]:
    """The first points of a search, then those of its sampler, which learns each trial that is seen."""
    import optuna

    study = optuna.create_study(directions=["minimize"] * 3, sampler=sampler)
    for number in itertools.count():
        if number < len(first_points):
            yield first_points[number]
        else:
            trial = study.ask()
            point = suggest(trial, choices)
            # The sampler gets the nearest recorded point instead.
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            yield point
        answer = seen[-1]
        study.enqueue_trial({lever: answer.point[lever] for lever in choices})
        trial = study.ask()
        suggest(trial, choices)
        tell(study, trial, answer.scores, answer.violations)


def _random(choices: Choices, seed: int) -> Iterator[Point]:
    """Points drawn evenly from the space."""
    rng = random.Random(seed)
    while True:
        yield {lever: rng.choice(values) for lever, values in choices.items()}


def _one_lever(choices: Choices, start: Point, seed: int) -> Iterator[Point]:
    """A start point, then every other value of each lever alone, in random order."""
    moves = [
        {**start, lever: value}
        for lever, values in choices.items()
        for value in values
        if value != start[lever]
    ]
    random.Random(seed).shuffle(moves)
    yield start
    yield from moves


def suggest(trial: Any, choices: Choices) -> dict[str, Choice]:
    """The values that Optuna's sampler suggests for a trial."""
    return {lever: trial.suggest_categorical(lever, list(values)) for lever, values in choices.items()}


def tell(study: Any, trial: Any, scores: Sequence[float] | None, violations: Mapping[str, float]) -> None:
    """Give a trial's scores, or that it ended early, and the constraints that it was judged by to the sampler."""
    from optuna.trial import TrialState

    for name, value in violations.items():
        trial.set_constraint(name, value)
    if scores is None:
        study.tell(trial, state=TrialState.PRUNED)
    else:
        study.tell(trial, list(scores))


@contextmanager
def _silenced_optuna() -> Iterator[None]:
    """Keep Optuna from logging thousands of trials."""
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
