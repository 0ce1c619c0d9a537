"""Intervals and p-values that hold at every look at a growing set of items, for all looks together.

A fixed interval holds for one look. Whoever adds items and looks again until the verdict is a pass is wrong far more
often than the interval says. An interval of this module covers the mean of the whole sequence at every number of items
at once (Ville's inequality), so a look costs nothing and none is lost by an earlier one. The order of the items has to
be fixed before the first look.

Right-or-wrong answers are judged by betting: capital that starts at 1 and is multiplied by 1 + bet x (value - limit)
for each item cannot grow if the mean is at the limit or below, so it passes 1 / alpha with a probability of at most
alpha. Several bets share the capital (Waudby-Smith and Ramdas, J. R. Stat. Soc. B 86 (2024), arXiv 2010.09686). Values
without bounds have Student's interval at the first look, which takes `FIRST_LOOK_SHARE` of alpha, and an asymptotic
interval for all later ones, which takes the rest (Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas, Ann. Statist. 52
(2024), arXiv 2103.06476, one-sided): the asymptotic one alone would take half as many items again for a single look.
"""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import scipy  # its parts are imported when they are used: they take a second
from numpy.typing import ArrayLike

from slimqwen.stats import intervals
from slimqwen.stats.estimates import CONFIDENCE_LEVEL, Estimate
from slimqwen.stats.intervals import Floats

ALPHA = (1 - CONFIDENCE_LEVEL) / 2
"""Probability that a variant whose loss is exactly the margin passes at any look: one tail of a verdict's interval."""

POWER = 0.956
"""Probability that an equally good variant passes a task of the size planned here; 0.8 for five tasks together."""

FIRST_LOOK_SHARE = 0.8
"""Share of `ALPHA` that the first look at a mean of values without bounds takes."""

BURN_IN = 50
"""Values before which a later look at such a mean adds nothing: the normal approximation starts there."""

_BETS = np.linspace(0.05, 0.95, 10)
"""Shares of the largest bet that cannot lose more than the capital; a tenth of the capital is on each."""

EVEN_SHARE = 1 / len(_BETS)
"""Share of the capital that is on the largest bet where all bets have the same."""

RARE_SHARE = 0.5
"""Share on the largest bet where hardly any item differs: without a difference, 450 items pass a limit of 0.01."""

_NARROWEST_AT = 100
"""Number of values at which the asymptotic interval has the fewest standard errors; it is hardly wider nearby."""

_LATER_ALPHA = (1 - FIRST_LOOK_SHARE) * ALPHA

_RHO_SQUARED = (1 - 2 * math.log(_LATER_ALPHA) + math.log(-2 * math.log(_LATER_ALPHA))) / _NARROWEST_AT
"""Variance of the mixing distribution, for which the interval is narrowest there (arXiv 2103.06476, appendix B.2)."""

_PLANNED_RUNS = 4_000

_LEAST_P_VALUE = 1e-12
_ENDS_TOLERANCE = 1e-6


def answers_p_value(values: ArrayLike, limit: float, largest_bet_share: float = EVEN_SHARE) -> Floats:
    """P-value of the hypothesis that the mean is at `limit` or below, valid for all looks up to the last value.

    Args:
        values: gain on each answer, between -1 and 1, in the order that was fixed before the first look; a
            matrix has a sequence in each row.
        limit: hypothetical mean, above -1.
        largest_bet_share: share of the capital on the largest bet, fixed before the first look.

    Returns:
        One p-value for each sequence: 1 / the largest capital so far.
    """
    x = np.atleast_2d(np.asarray(values, dtype=np.float64))
    bets = _BETS / max(1 + limit, _ENDS_TOLERANCE)
    capitals = np.array([np.cumsum(np.log1p(bet * (x - limit)), axis=1) for bet in bets])
    joined = scipy.special.logsumexp(capitals, axis=0, b=_shares(largest_bet_share)[:, None, None])
    largest = np.maximum(joined.max(axis=1, initial=0.0), 0.0)
    return np.asarray(np.maximum(np.exp(-largest), _LEAST_P_VALUE))


def _shares(largest_bet_share: float) -> Floats:
    """Share of the capital on each bet; what is not on the largest one is spread evenly."""
    rest = (1 - largest_bet_share) / (len(_BETS) - 1)
    return np.array([*[rest] * (len(_BETS) - 1), largest_bet_share])


def answers_interval(values: ArrayLike, largest_bet_share: float = EVEN_SHARE) -> tuple[float, float]:
    """Ends of the interval of the mean, valid for all looks up to the last value.

    Each end misses the mean with a probability of at most `ALPHA` (2.5 %). It is the mean with which `answers_p_value`
    equals `ALPHA`.

    Args:
        values: between -1 and 1, in the order that was fixed before the first look.
        largest_bet_share: share of the capital on the largest bet, fixed before the first look.
    """
    x = np.asarray(values, dtype=np.float64)
    return _lower_end(x, largest_bet_share), -_lower_end(-x, largest_bet_share)


def _lower_end(values: Floats, largest_bet_share: float) -> float:
    def excess(limit: float) -> float:
        return math.log(float(answers_p_value(values, limit, largest_bet_share)[0]) / ALPHA)

    nearest, farthest = -1 + _ENDS_TOLERANCE, 1.0
    if excess(nearest) > 0:
        return -1.0
    return float(scipy.optimize.brentq(excess, nearest, farthest, xtol=_ENDS_TOLERANCE))


def mean_interval(values: ArrayLike, weights: ArrayLike, first_look: int) -> tuple[float, float]:
    """Ends of the interval of a weighted mean of values without bounds, valid for all looks up to the last value.

    Args:
        values: in the order that was fixed before the first look.
        weights: weight of each value, as in `intervals.mean`.
        first_look: number of values of the first look, at least 2.

    Raises:
        TooFewItemsError: the first look has fewer than two values.
    """
    x, w = np.asarray(values, dtype=np.float64), np.asarray(weights, dtype=np.float64)
    first = _first_mean(x, w, first_look)
    half_width = first.standard_error * scipy.stats.t.ppf(1 - FIRST_LOOK_SHARE * ALPHA, first_look - 1)
    counts, means, errors = _later_means(x, w, first_look)
    variances = counts * _RHO_SQUARED
    half_widths = errors * np.sqrt(
        2 * (variances + 1) / variances * np.log1p(np.sqrt(variances + 1) / (2 * _LATER_ALPHA))
    )
    low = (means - half_widths).max(initial=first.value - half_width)
    return float(low), float((means + half_widths).min(initial=first.value + half_width))


def mean_p_value(values: ArrayLike, weights: ArrayLike, first_look: int, limit: float) -> float:
    """P-value of the hypothesis that a weighted mean is at `limit` or below, valid for all looks up to the last value.

    It is at most `ALPHA` (2.5 %) exactly where the lower end of `mean_interval` lies above the limit.

    Args:
        values: in the order that was fixed before the first look.
        weights: weight of each value, as in `intervals.mean`.
        first_look: number of values of the first look, at least 2.
        limit: hypothetical mean.

    Raises:
        TooFewItemsError: the first look has fewer than two values.
    """
    x, w = np.asarray(values, dtype=np.float64), np.asarray(weights, dtype=np.float64)
    first = _first_mean(x, w, first_look)
    p_value = intervals.p_value(first.value, first.standard_error, first.count, limit, higher_is_better=True)
    counts, means, errors = _later_means(x, w, first_look)
    distances = means - limit
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        scores = np.where(distances > 0, distances / errors, 0.0)
        variances = counts * _RHO_SQUARED
        exponents = scores**2 * variances / (2 * (variances + 1))
        later = np.sqrt(variances + 1) / (2 * np.expm1(exponents))
    joined = min(p_value / FIRST_LOOK_SHARE, later.min(initial=1.0) / (1 - FIRST_LOOK_SHARE), 1.0)
    return max(float(joined), _LEAST_P_VALUE)


def _first_mean(x: Floats, w: Floats, first_look: int) -> Estimate:
    """The mean of the first look; its standard error is not smaller than by the variance of all values.

    Early values may differ less than later ones, or not at all: an interval of no width would never contain the mean
    again. A larger error only widens an interval, which keeps its coverage.
    """
    first = intervals.mean(x[:first_look], w[:first_look])
    by_all = intervals.mean(x, w).standard_error * math.sqrt(len(x) / first_look)
    return replace(first, standard_error=max(first.standard_error, by_all))


def _later_means(x: Floats, w: Floats, first_look: int) -> tuple[Floats, Floats, Floats]:
    """Number, weighted mean and its standard error (as in `intervals.mean`) of the values up to each later one."""
    counts, totals = np.arange(1.0, len(x) + 1), np.cumsum(w)
    means = np.cumsum(w * x) / totals
    # About the last mean, because sums of large squares would cancel.
    residuals, shifts = x - means[-1:], means - means[-1:]
    squares = (
        np.cumsum((w * residuals) ** 2)
        - 2 * shifts * np.cumsum(w**2 * residuals)
        + shifts**2 * np.cumsum(w**2)
    )
    later = slice(max(first_look, BURN_IN), None)
    counts, means = counts[later], means[later]
    variances = counts / (counts - 1) * np.maximum(squares[later], 0.0) / totals[later] ** 2
    if len(counts):  # as in `_first_mean`
        variances = np.maximum(variances, variances[-1] * counts[-1] / counts)
    return np.asarray(counts), np.asarray(means), np.asarray(np.sqrt(variances))


@cache
def items_to_decide(margin: float, discordance: float, largest_bet_share: float = EVEN_SHARE) -> int:
    """Number of right-or-wrong items at which an equally good variant has passed with probability `POWER` (95.6 %).

    It is found by simulation: 4,000 runs with a fixed seed, with a look whenever the items grow by 1 %.

    Args:
        margin: the largest loss that still counts as equal, above 0.
        discordance: share of the items that only one side gets right; either gets half of them.
        largest_bet_share: share of the capital on the largest bet, fixed before the first look.
    """
    rng = np.random.default_rng(intervals.BOOTSTRAP_SEED)
    gained, lost = np.zeros(_PLANNED_RUNS), np.zeros(_PLANNED_RUNS)
    passed, count = np.zeros(_PLANNED_RUNS, dtype=bool), 0
    bets = (_BETS / max(1 - margin, _ENDS_TOLERANCE))[:, None]
    while passed.mean() < POWER:
        new = max(1, count // 100)
        count += new
        of_new = rng.binomial(new, discordance, _PLANNED_RUNS)
        won = rng.binomial(of_new, 0.5)
        gained += won
        lost += of_new - won
        capitals = (
            gained * np.log1p(bets * (margin + 1))
            + lost * np.log1p(bets * (margin - 1))
            + (count - gained - lost) * np.log1p(bets * margin)
        )
        passed |= _shares(largest_bet_share) @ np.exp(capitals) >= 1 / ALPHA
    return count


def items_to_decide_mean(margin: float, deviation: float) -> int:
    """Number of items with which an equally good variant passes at the first look with probability `POWER` (95.6 %).

    It is for a measure that is not right or wrong, such as log-probabilities, and uses the normal approximation.

    Args:
        margin: the largest loss that still counts as equal, above 0.
        deviation: standard deviation of the items' paired differences, in the unit of the margin.
    """
    quantile_sum = float(scipy.stats.norm.ppf(1 - FIRST_LOOK_SHARE * ALPHA) + scipy.stats.norm.ppf(POWER))
    return max(2, math.ceil((quantile_sum * deviation / margin) ** 2))
