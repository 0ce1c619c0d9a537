"""Estimates, paired differences and ratios, each with its uncertainty.

Nothing here knows what was measured. Intervals are 95 % percentile bootstrap intervals with a fixed seed, so the
same records always give the same figures.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from slimqwen.errors import SlimqwenError

CONFIDENCE_LEVEL = 0.95
BOOTSTRAP_SEED = 20260101
BOOTSTRAP_RESAMPLES = 9_999
_RESAMPLES_AT_ONCE = 250  # bounds memory: 12,000 items x 250 resamples x 8 bytes is 24 MB

Floats = NDArray[np.float64]


class TooFewItemsError(SlimqwenError):
    """Uncertainty was asked of fewer observations than can show any."""


@dataclass(frozen=True)
class Estimate:
    """A mean over `count` items and its standard error, in the unit of the items."""

    value: float
    standard_error: float
    count: int


@dataclass(frozen=True)
class Difference:
    """Second minus first on the same `count` items: mean, standard error and 95 % interval."""

    value: float
    standard_error: float
    low: float
    high: float
    count: int


@dataclass(frozen=True)
class Discordance:
    """Items that only the first, or only the second, got right; p is McNemar's exact two-sided one."""

    only_first: int
    only_second: int
    p_value: float


@dataclass(frozen=True)
class Ratio:
    """A ratio and its 95 % interval."""

    value: float
    low: float
    high: float


def mean(values: ArrayLike, weights: ArrayLike | None = None) -> Estimate:
    """Mean of the values and its standard error over items.

    With weights (the bytes of a document, the tokens of a request) it is the ratio estimator
    sum(w x) / sum(w), whose standard error treats whole items as the sampled units (Cochran, Sampling
    Techniques, 3rd ed., eq. 6.13); with equal weights that is the textbook s / sqrt(n).

    Raises:
        TooFewItemsError: fewer than two values.
    """
    x, w = _paired_arrays(values, np.ones(np.size(np.asarray(values))) if weights is None else weights)
    value = float(np.average(x, weights=w))
    residuals = w * (x - value)
    variance = len(x) / (len(x) - 1) * float(np.sum(residuals**2)) / float(np.sum(w)) ** 2
    return Estimate(value, float(np.sqrt(variance)), len(x))


def paired_difference(first: ArrayLike, second: ArrayLike, weights: ArrayLike | None = None) -> Difference:
    """Mean of second minus first over the same items, in order, with a paired bootstrap interval.

    Raises:
        TooFewItemsError: fewer than two items.
        ValueError: the two sides differ in length.
    """
    a, b = _paired_arrays(first, second)
    differences = b - a
    w = np.ones(len(a)) if weights is None else np.asarray(weights, dtype=np.float64)
    estimate = mean(differences, w)

    def weighted_mean(d: Floats, v: Floats, axis: int) -> Floats:
        return np.asarray(np.sum(d * v, axis=axis) / np.sum(v, axis=axis))

    interval = stats.bootstrap(
        (differences, w),
        weighted_mean,
        paired=True,
        n_resamples=BOOTSTRAP_RESAMPLES,
        batch=_RESAMPLES_AT_ONCE,
        confidence_level=CONFIDENCE_LEVEL,
        method="percentile",
        rng=np.random.default_rng(BOOTSTRAP_SEED),
    ).confidence_interval
    return Difference(
        estimate.value, estimate.standard_error, float(interval.low), float(interval.high), estimate.count
    )


def percentile_over_groups(groups: Sequence[ArrayLike], percent: float) -> Estimate:
    """A percentile of all observations together, its standard error by the bootstrap over whole groups.

    Raises:
        TooFewItemsError: fewer than two groups.
    """
    arrays = [np.asarray(group, dtype=np.float64) for group in groups]
    _require_two(len(arrays))
    chance = np.random.default_rng(BOOTSTRAP_SEED)
    drawn = [
        float(
            np.percentile(
                np.concatenate([arrays[i] for i in chance.integers(len(arrays), size=len(arrays))]), percent
            )
        )
        for _ in range(200)
    ]
    value = float(np.percentile(np.concatenate(arrays), percent))
    return Estimate(value, float(np.std(drawn, ddof=1)), len(arrays))


def mcnemar(first: Sequence[bool], second: Sequence[bool]) -> Discordance:
    """McNemar's exact test on paired right-or-wrong answers: a binomial test of the discordant pairs.

    Raises:
        ValueError: the two sides differ in length.
    """
    pairs = list(zip(first, second, strict=True))
    only_first = sum(a and not b for a, b in pairs)
    only_second = sum(b and not a for a, b in pairs)
    discordant = only_first + only_second
    p_value = float(stats.binomtest(only_first, discordant).pvalue) if discordant else 1.0
    return Discordance(only_first, only_second, p_value)


def ratio_of_medians(numerator: ArrayLike, denominator: ArrayLike) -> Ratio:
    """median(numerator) / median(denominator), resampling the two sides independently.

    Raises:
        TooFewItemsError: fewer than two values on a side.
    """
    a, b = np.asarray(numerator, dtype=np.float64), np.asarray(denominator, dtype=np.float64)
    _require_two(min(len(a), len(b)))

    def ratio(x: Floats, y: Floats, axis: int) -> Floats:
        return np.asarray(np.median(x, axis=axis) / np.median(y, axis=axis))

    interval = stats.bootstrap(
        (a, b),
        ratio,
        n_resamples=BOOTSTRAP_RESAMPLES,
        batch=_RESAMPLES_AT_ONCE,
        confidence_level=CONFIDENCE_LEVEL,
        method="percentile",
        rng=np.random.default_rng(BOOTSTRAP_SEED),
    ).confidence_interval
    return Ratio(float(np.median(a) / np.median(b)), float(interval.low), float(interval.high))


def supported_percentiles(count: int, wanted: Sequence[int] = (90, 99)) -> list[int]:
    """Those percentiles that at least one of `count` observations is expected to lie beyond.

    The 99th of fewer than 100 observations is only their maximum, so it is not offered.
    """
    return [p for p in wanted if count * (100 - p) >= 100]


def _paired_arrays(first: ArrayLike, second: ArrayLike) -> tuple[Floats, Floats]:
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if a.shape != b.shape:
        raise ValueError(f"paired values differ in number: {len(a)} and {len(b)}")
    _require_two(len(a))
    return a, b


def _require_two(count: int) -> None:
    if count < 2:
        raise TooFewItemsError(
            f"{count} item(s) measured, a standard error needs at least 2: raise the limit"
        )
