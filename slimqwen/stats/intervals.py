"""Estimates, paired differences and ratios, each with its 95 % interval.

Intervals over items are percentile bootstrap intervals with a fixed seed, so that the same records always give the same
figures. Intervals over rounds, of which there are few, are Student's t intervals.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy  # its parts are imported when they are used: they take a second
from numpy.typing import ArrayLike, NDArray

from slimqwen.errors import SlimqwenError
from slimqwen.stats.estimates import CONFIDENCE_LEVEL, Difference, Estimate, Ratio

BOOTSTRAP_SEED = 20260101
BOOTSTRAP_RESAMPLES = 9_999
_RESAMPLES_AT_ONCE = 250  # bounds memory: 12,000 items x 250 resamples x 8 bytes is 24 MB

Floats = NDArray[np.float64]


class TooFewItemsError(SlimqwenError):
    """Too few observations for an interval."""


@dataclass(frozen=True)
class Discordance:
    """Numbers of items that only the first or only the second side got right, with McNemar's exact two-sided p."""

    only_first: int
    only_second: int
    p_value: float


def by_cluster(
    values: ArrayLike, weights: ArrayLike | None, clusters: Sequence[Hashable] | None
) -> tuple[Floats, Floats]:
    """The weighted mean and the weight of each cluster, in the order in which clusters first appear.

    Items that share a passage, and repeats of one item, are not independent: they form a cluster, which is the unit of
    observation.

    Args:
        values: value of each item.
        weights: weight of each item; None for 1.
        clusters: a key of each item's cluster; None to make every item a cluster of its own.

    Raises:
        ValueError: values, weights and clusters differ in number.
    """
    x = np.asarray(values, dtype=np.float64)
    w = np.ones(len(x)) if weights is None else np.asarray(weights, dtype=np.float64)
    if len(x) != len(w) or (clusters is not None and len(x) != len(clusters)):
        raise ValueError("values, weights and clusters differ in number")
    if clusters is None:
        return x, w
    index_by_cluster: dict[Hashable, int] = {}
    indices = [index_by_cluster.setdefault(cluster, len(index_by_cluster)) for cluster in clusters]
    total = np.asarray(np.bincount(indices, weights=w), dtype=np.float64)
    return np.bincount(indices, weights=w * x) / total, total


def mean(
    values: ArrayLike, weights: ArrayLike | None = None, clusters: Sequence[Hashable] | None = None
) -> Estimate:
    """Mean of the values and its standard error over items, or over clusters of items.

    With weights (bytes of a document, tokens of a request) the mean is the ratio estimator sum(w x) / sum(w) with items
    as sampled units (Cochran, Sampling Techniques, 3rd ed., eq. 6.13). With equal weights its error is s / sqrt(n).

    Args:
        values: value of each item.
        weights: weight of each item; None for equal weights.
        clusters: a key of each item's cluster, such as the passage that items share; None if items are independent.

    Raises:
        TooFewItemsError: fewer than two values or clusters.
    """
    x, w = by_cluster(values, weights, clusters)
    _require_two(len(x))
    value = float(np.average(x, weights=w))
    residuals = w * (x - value)
    variance = len(x) / (len(x) - 1) * float(np.sum(residuals**2)) / float(np.sum(w)) ** 2
    return Estimate(value, float(np.sqrt(variance)), len(x))


def paired_difference(
    first: ArrayLike,
    second: ArrayLike,
    weights: ArrayLike | None = None,
    clusters: Sequence[Hashable] | None = None,
) -> Difference:
    """Mean of second minus first over the same items in the same order, with a paired bootstrap interval.

    Args:
        first, second: values of the two sides.
        weights: weight of each item; None for equal weights.
        clusters: a key of each item's cluster: whole clusters are resampled, and `count` is their number. None if items
            are independent.

    Raises:
        TooFewItemsError: fewer than two items or clusters.
        ValueError: the two sides differ in length.
    """
    a, b = _paired_arrays(first, second)
    differences, w = by_cluster(b - a, weights, clusters)
    estimate = mean(differences, w)

    def weighted_mean(d: Floats, v: Floats, axis: int) -> Floats:
        return np.asarray(np.sum(d * v, axis=axis) / np.sum(v, axis=axis))

    low, high = bootstrap_interval((differences, w), weighted_mean, paired=True)
    return Difference(estimate.value, estimate.standard_error, low, high, estimate.count)


def percentile_over_groups(groups: Sequence[ArrayLike], percent: float) -> Estimate:
    """A percentile of all observations, with the standard error of a bootstrap over whole groups.

    Args:
        groups: observations of each group.
        percent: which percentile, 0 to 100.

    Raises:
        TooFewItemsError: fewer than two groups.
    """
    arrays = [np.asarray(group, dtype=np.float64) for group in groups]
    _require_two(len(arrays))
    rng = np.random.default_rng(BOOTSTRAP_SEED)
    resamples = (rng.integers(len(arrays), size=len(arrays)) for _ in range(200))
    percentiles = [
        float(np.percentile(np.concatenate([arrays[i] for i in indices]), percent)) for indices in resamples
    ]
    value = float(np.percentile(np.concatenate(arrays), percent))
    return Estimate(value, float(np.std(percentiles, ddof=1)), len(arrays))


def mcnemar(first: Sequence[bool], second: Sequence[bool]) -> Discordance:
    """McNemar's exact test of paired right-or-wrong answers: a binomial test of the discordant pairs.

    Raises:
        ValueError: the two sides differ in length.
    """
    pairs = list(zip(first, second, strict=True))
    only_first = sum(a and not b for a, b in pairs)
    only_second = sum(b and not a for a, b in pairs)
    discordant = only_first + only_second
    p_value = float(scipy.stats.binomtest(only_first, discordant).pvalue) if discordant else 1.0
    return Discordance(only_first, only_second, p_value)


def ratio_of_medians(
    numerator: ArrayLike, denominator: ArrayLike, *, level: float = CONFIDENCE_LEVEL
) -> Ratio:
    """median(numerator) / median(denominator), resampling the two sides independently.

    Args:
        level: confidence level of the interval.

    Raises:
        TooFewItemsError: fewer than two values on a side.
    """
    a, b = np.asarray(numerator, dtype=np.float64), np.asarray(denominator, dtype=np.float64)
    _require_two(min(len(a), len(b)))

    def ratio(x: Floats, y: Floats, axis: int) -> Floats:
        return np.asarray(np.median(x, axis=axis) / np.median(y, axis=axis))

    low, high = bootstrap_interval((a, b), ratio, level=level)
    return Ratio(float(np.median(a) / np.median(b)), low, high)


def student_half_width(standard_error: float, degrees_of_freedom: float) -> float:
    """Half the width of the 95 % interval by Student's t."""
    return float(scipy.stats.t.ppf((1 + CONFIDENCE_LEVEL) / 2, degrees_of_freedom)) * standard_error


def ratio_by_round(
    numerator: Mapping[int, Sequence[float]],
    denominator: Mapping[int, Sequence[float]],
    *,
    in_turns: bool,
    level: float = CONFIDENCE_LEVEL,
) -> tuple[Ratio, int]:
    """The ratio of two medians of observations that were made in rounds, with an interval over rounds.

    Requests of one round share the state of the server and of the machine, which an interval over requests ignores.
    If a side has a single round, the interval is over requests nevertheless.

    Args:
        numerator, denominator: number of a round -> its observations.
        in_turns: whether rounds of the same number were measured next to each other, so that they are paired.
        level: confidence level of the interval.

    Returns:
        The ratio, and the number of rounds that its interval is over; 0 if the interval is over requests.

    Raises:
        TooFewItemsError: fewer than two observations on a side.
    """
    sides = [
        {number: np.median(values) for number, values in side.items()} for side in (numerator, denominator)
    ]
    if in_turns:
        sides = [
            {n: median for n, median in side.items() if n in sides[0] and n in sides[1]} for side in sides
        ]
    rounds = min(map(len, sides))
    if rounds < 2:
        observations = (np.concatenate(list(side.values())) for side in (numerator, denominator))
        return ratio_of_medians(*observations, level=level), 0
    first, second = ([side[n] for n in sorted(side)] for side in sides)
    return ratio_of_rounds(first, second, in_turns=in_turns, level=level), rounds


def ratio_of_rounds(
    numerator: ArrayLike, denominator: ArrayLike, *, in_turns: bool, level: float = CONFIDENCE_LEVEL
) -> Ratio:
    """Ratio of geometric means of one figure per round, with Student's t interval on the logarithms.

    A round corresponds to a restart in Kalibera and Jones, Rigorous Benchmarking in Reasonable Time (ISMM 2013). Over
    so few values a bootstrap interval covers less than 95 %.

    Args:
        in_turns: whether rounds are paired by their order; otherwise the interval is Welch's.
        level: confidence level of the interval.

    Raises:
        TooFewItemsError: fewer than two rounds on a side.
        ValueError: a figure is not positive, or the sides of pairs differ in number.
    """
    a, b = (np.asarray(side, dtype=np.float64) for side in (numerator, denominator))
    _require_two(min(len(a), len(b)))
    if min(a.min(), b.min()) <= 0:
        raise ValueError("a ratio over rounds needs positive figures")
    a, b = np.log(a), np.log(b)
    if in_turns:
        a, b = np.subtract(*_paired_arrays(a, b)), np.zeros(1)
    log_ratio = low = high = float(a.mean() - b.mean())
    if a.std() or b.std():  # if all rounds agree, the interval has no width
        test = scipy.stats.ttest_1samp(a, 0) if in_turns else scipy.stats.ttest_ind(a, b, equal_var=False)
        low, high = map(float, test.confidence_interval(level))
    return Ratio(math.exp(log_ratio), math.exp(low), math.exp(high))


def paired_ratio(
    first: ArrayLike, second: ArrayLike, first_weights: ArrayLike, second_weights: ArrayLike
) -> Ratio:
    """Weighted mean of second / weighted mean of first over the same units, which are resampled together.

    Raises:
        TooFewItemsError: fewer than two units.
        ValueError: the sides differ in length.
    """
    a, v = _paired_arrays(first, first_weights)
    b, w = _paired_arrays(second, second_weights)
    _paired_arrays(a, b)

    def ratio(a: Floats, v: Floats, b: Floats, w: Floats, axis: int) -> Floats:
        first_mean = np.sum(a * v, axis=axis) / np.sum(v, axis=axis)
        return np.asarray(np.sum(b * w, axis=axis) / np.sum(w, axis=axis) / first_mean)

    low, high = bootstrap_interval((a, v, b, w), ratio, paired=True)
    return Ratio(float(ratio(a, v, b, w, 0)), low, high)


def p_value(
    value: float, standard_error: float, count: int, limit: float, *, higher_is_better: bool
) -> float:
    """One-sided p-value, by Student's t, of the hypothesis that an estimate lies at `limit` or on its wrong side.

    A bootstrap would reject too often over the few dozen items of some tasks: of samples of 37 normal values with a
    mean exactly at the limit, 3.1 % instead of 2.5 % have their 95 % bootstrap interval beyond the limit.

    Args:
        count: items or clusters of the estimate.
        higher_is_better: whether the right side is above the limit.
    """
    distance = value - limit if higher_is_better else limit - value
    if standard_error == 0:
        return float(distance < 0)
    return float(scipy.stats.t.sf(distance / standard_error, count - 1))


def paired_ratio_p_value(
    first: ArrayLike,
    second: ArrayLike,
    first_weights: ArrayLike,
    second_weights: ArrayLike,
    limit: float,
    *,
    higher_is_better: bool = True,
) -> float:
    """One-sided p-value of the hypothesis that the ratio of `paired_ratio` lies at `limit` or on its wrong side.

    The test is on the mean of second - limit x first instead of the ratio, so that no quotient has to be linearised
    (Fieller, J. R. Stat. Soc. B 16 (1954), 175-185). The variance is computed as in `mean`, from both sides of a unit.
    """
    a, v = _paired_arrays(first, first_weights)
    b, w = _paired_arrays(second, second_weights)
    first_mean, second_mean = np.average(a, weights=v), np.average(b, weights=w)
    residuals = w * (b - second_mean) / w.sum() - limit * v * (a - first_mean) / v.sum()
    error = math.sqrt(len(a) / (len(a) - 1) * float(np.sum(residuals**2)))
    distance = float(second_mean - limit * first_mean)
    return p_value(distance, error, len(a), 0.0, higher_is_better=higher_is_better)


def bootstrap_interval(
    samples: Sequence[NDArray[Any]],
    statistic: Callable[..., Any],
    *,
    paired: bool = False,
    batch: int = _RESAMPLES_AT_ONCE,
    level: float = CONFIDENCE_LEVEL,
) -> tuple[float, float]:
    """The percentile bootstrap interval of a statistic, with a fixed seed.

    Args:
        samples: arrays of observations.
        statistic: function that takes the arrays of `samples` and the keyword `axis`.
        paired: whether the samples are resampled together; they must then have the same length.
        batch: resamples computed at once, which decides memory and the order of draws.
        level: confidence level of the interval.

    Returns:
        Lower and upper end.
    """
    interval = scipy.stats.bootstrap(
        samples,
        statistic,
        paired=paired,
        n_resamples=BOOTSTRAP_RESAMPLES,
        batch=batch,
        confidence_level=level,
        method="percentile",
        rng=np.random.default_rng(BOOTSTRAP_SEED),
    ).confidence_interval
    return float(interval.low), float(interval.high)


def _paired_arrays(first: ArrayLike, second: ArrayLike) -> tuple[Floats, Floats]:
    a, b = (np.asarray(side, dtype=np.float64) for side in (first, second))
    if a.shape != b.shape:
        raise ValueError(f"paired values differ in number: {len(a)} and {len(b)}")
    _require_two(len(a))
    return a, b


def _require_two(count: int) -> None:
    if count < 2:
        raise TooFewItemsError(
            f"{count} item(s) measured, a standard error needs at least 2; measure more (a higher --limit)"
        )
