"""Non-inferiority: does a paired difference rule out a loss beyond the margin that was fixed beforehand?"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy  # its parts are imported when they are used: they take a second
from numpy.typing import ArrayLike

from slimqwen.stats.estimates import CONFIDENCE_LEVEL, Difference, Estimate
from slimqwen.stats.intervals import Discordance, Floats, student_half_width
from slimqwen.stats.verdict import Verdict

ALPHA = (1 - CONFIDENCE_LEVEL) / 2
"""Probability that a variant whose loss is exactly the margin passes: one tail of the interval of a verdict."""

POWER = 0.956
"""Probability that an equally good variant passes a task of the size planned here; 0.8 for five tasks together."""

_LEAST_EXPONENT = -12
"""Base-10 exponent of the smallest p-value that is computed."""


@dataclass(frozen=True)
class Judgement:
    """A verdict and its grounds: gains in the unit of the measure, so a loss is negative.

    Attributes:
        verdict: pass where the whole interval lies above -margin.
        low, high: ends of the interval of the gain, at `CONFIDENCE_LEVEL`.
        margin: the largest loss that still counts as equal, 0 or above.
        items_needed: number of items with which the measured gain would pass; None if this run passed, or if more
            items would not help.
    """

    verdict: Verdict
    low: float
    high: float
    margin: float
    items_needed: int | None


def judge_loss(
    difference: Difference, discordance: Discordance | None, *, margin: float, higher_is_better: bool
) -> Judgement:
    """Judge whether the second side scores worse than the first on the same items.

    Args:
        difference: second minus first; its bootstrap interval is used if `discordance` is None.
        discordance: numbers of items that only one side got right, None where items are not simply right or wrong. The
            interval from them is exact, and does not shrink to nothing where few items differ.
        margin: the largest loss that still counts as equal.
    """
    sign = 1 if higher_is_better else -1
    gain = sign * difference.value
    low, high = sorted((sign * difference.low, sign * difference.high))
    if discordance is not None:
        low, high = paired_proportion_interval(discordance, difference.count)
    verdict = Verdict.from_interval(low, high, -margin, higher_is_better=True, limit_passes=False)
    items_needed = None
    if verdict is Verdict.INCONCLUSIVE and gain > -margin:
        if discordance is None:
            # Widths shrink with the root of the number of items.
            items_needed = math.ceil(difference.count * ((gain - low) / (gain + margin)) ** 2)
        else:
            items_needed = _items_needed(discordance, difference.count, margin)
    return Judgement(verdict, low, high, margin, items_needed)


def paired_proportion_interval(discordance: Discordance, count: int) -> tuple[float, float]:
    """The interval of the second side's share of right items minus the first side's, on the same `count` items.

    Each discordant share has its exact interval (Clopper and Pearson, 1934) at a level that makes both hold together
    at `CONFIDENCE_LEVEL` at least, so the interval is conservative.
    """
    return _interval(discordance.only_second, discordance.only_first, count)


def paired_proportion_p_value(discordance: Discordance, count: int, margin: float) -> float:
    """One-sided p-value of the hypothesis that the loss is the margin or more: the least level that rejects it.

    The interval of `paired_proportion_interval` at that level ends at -margin, so the p-value is as conservative.
    """

    def distance_to_margin(exponent: float) -> float:
        return _interval(discordance.only_second, discordance.only_first, count, 10**exponent)[0] + margin

    if distance_to_margin(0) <= 0:
        return 1.0
    if distance_to_margin(_LEAST_EXPONENT) > 0:
        return float(10**_LEAST_EXPONENT)
    return float(10 ** scipy.optimize.brentq(distance_to_margin, _LEAST_EXPONENT, 0))


def judge_floor(estimate: Estimate, floor: float, *, right: int | None) -> Verdict:
    """Judge whether a score lies above `floor`.

    Args:
        floor: in the unit of the score, of which more is better.
        right: number of right items, which gives an exact interval (Clopper and Pearson, 1934); None where items are
            not simply right or wrong, which gives Student's interval over items or clusters.
    """
    if right is None:
        half_width = student_half_width(estimate.standard_error, estimate.count - 1)
        low, high = estimate.value - half_width, estimate.value + half_width
    else:
        interval = scipy.stats.binomtest(right, estimate.count).proportion_ci(CONFIDENCE_LEVEL)
        low, high = float(interval.low), float(interval.high)
    return Verdict.from_interval(low, high, floor, higher_is_better=True, limit_passes=False)


def items_to_decide(margin: float, discordance: float) -> int:
    """Number of right-or-wrong items with which an equally good variant passes with probability `POWER`.

    It adds up the probabilities of all pairs of numbers of gained and lost items that pass by the interval of
    `judge_loss`. An item is gained with a probability of half of `discordance`, and lost with the same probability.

    Args:
        margin: the largest loss that still counts as equal, above 0.
        discordance: share of the items that only one side gets right, between 0 and 1.
    """

    def enough(count: float) -> bool:
        items = int(count)
        reach = 6 * math.sqrt(items * discordance / 2) + 6
        gained = np.arange(
            max(0, math.floor(items * discordance / 2 - reach)),
            min(items, math.ceil(items * discordance / 2 + reach)) + 1,
        )
        low, high = _share_bounds(gained, items, ALPHA)
        passing = low[:, None] - high[None, :] > -margin
        # The number of gained items, and the number of lost ones among the others.
        probability = scipy.stats.binom.pmf(gained, items, discordance / 2)[:, None] * scipy.stats.binom.pmf(
            gained[None, :], items - gained[:, None], discordance / (2 - discordance)
        )
        return float(probability[passing].sum()) >= POWER

    return _fewest(enough, 2, integers=True)


def items_to_decide_mean(margin: float, deviation: float) -> int:
    """`items_to_decide` for a measure that is not simply right or wrong, by normal approximation.

    Args:
        margin: the largest loss that still counts as equal, above 0.
        deviation: standard deviation of the items' paired differences, in the unit of the margin.
    """
    quantile_sum = float(scipy.stats.norm.ppf((1 + CONFIDENCE_LEVEL) / 2) + scipy.stats.norm.ppf(POWER))
    return max(2, math.ceil((quantile_sum * deviation / margin) ** 2))


def _interval(gained: float, lost: float, count: float, alpha: float = ALPHA) -> tuple[float, float]:
    """`paired_proportion_interval` at the one-sided level `alpha`, for numbers of items that need not be whole."""
    low, high = _share_bounds([gained, lost], count, alpha)
    return float(low[0] - high[1]), float(high[0] - low[1])


def _share_bounds(numbers: ArrayLike, count: float, alpha: float) -> tuple[Floats, Floats]:
    """Exact lower and upper ends of the shares `numbers` / `count`, each at half of `alpha`: two are combined."""
    successes = np.asarray(numbers, dtype=np.float64)
    low = scipy.stats.beta.ppf(alpha / 2, successes, count - successes + 1)
    high = scipy.stats.beta.ppf(1 - alpha / 2, successes + 1, count - successes)
    # The ends of no item and of all items are not defined.
    return np.nan_to_num(low, nan=0.0), np.nan_to_num(high, nan=1.0)


def _items_needed(discordance: Discordance, count: int, margin: float) -> int:
    """The fewest items with which the same shares of gained and lost items would pass; the gain is above -margin."""

    def passes(items: float) -> bool:
        share = items / count
        return _interval(discordance.only_second * share, discordance.only_first * share, items)[0] > -margin

    return _fewest(passes, count, integers=False)


def _fewest(enough: Callable[[float], bool], start: float, *, integers: bool) -> int:
    """The fewest items for which `enough` holds, to within 1 %: `start` is doubled, then bisected."""
    count = start
    while not enough(count):
        count *= 2
    too_few = count / 2
    while count - too_few > max(1 if integers else 0, 0.01 * count):
        middle = (too_few + count) / 2
        middle = math.floor(middle) if integers else middle
        too_few, count = (too_few, middle) if enough(middle) else (middle, count)
    return math.ceil(count)
