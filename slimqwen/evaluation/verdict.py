"""Non-inferiority: does a paired difference rule out a loss beyond the margin that was written down before?

Three answers, because a run that could not have seen such a loss says nothing: it passes only where the whole interval
lies within the margin, fails only where the whole interval lies beyond it.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from scipy import stats

from slimqwen.evaluation.statistics import CONFIDENCE_LEVEL, Difference, Discordance, Estimate

POWER = 0.8
"""The chance that a run whose size was planned here lets an equally good variant pass."""


class Verdict(StrEnum):
    """What a run says about a loss beyond the margin."""

    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True)
class Judgement:
    """A verdict and what it rests on, all in the unit of the measure and as gains: a loss is negative.

    Attributes:
        low: of the interval of the gain, at `CONFIDENCE_LEVEL`.
        high: of the interval of the gain.
        margin: the loss that still counts as equal, not negative.
        items_needed: items that a run would take to pass if the gain stayed as measured; None where it has passed, or
            where more items would not make it pass.
    """

    verdict: Verdict
    low: float
    high: float
    margin: float
    items_needed: int | None


def judge(
    difference: Difference, discordance: Discordance | None, *, margin: float, higher_is_better: bool
) -> Judgement:
    """Judge second minus first on the same items.

    Args:
        difference: with its bootstrap interval, which is used where items are not simply right or wrong.
        discordance: the items that only one side got right; then the interval is exact and does not shrink to
            nothing where few items differ.
        margin: the loss that still counts as equal.
        higher_is_better: whether a positive difference is a gain.
    """
    sign = 1 if higher_is_better else -1
    gain = sign * difference.value
    low, high = sorted((sign * difference.low, sign * difference.high))
    if discordance is not None:
        low, high = paired_proportion_interval(discordance, difference.count)
    verdict = Verdict.INCONCLUSIVE
    if low > -margin:
        verdict = Verdict.PASS
    elif high < -margin:
        verdict = Verdict.FAIL
    needed = None
    if verdict is Verdict.INCONCLUSIVE and gain > -margin:
        if discordance is None:
            # Widths shrink with the root of the number of items.
            needed = math.ceil(difference.count * ((gain - low) / (gain + margin)) ** 2)
        else:
            needed = _items_needed(discordance, difference.count, margin)
    return Judgement(verdict, low, high, margin, needed)


def paired_proportion_interval(discordance: Discordance, count: int) -> tuple[float, float]:
    """An interval of the share that the second gets right minus that of the first, on the same items.

    Each discordant share has its exact interval (Clopper and Pearson, 1934) at a level that makes both hold together
    at `CONFIDENCE_LEVEL` at least, so the interval is conservative.

    Args:
        discordance: items that only one of the two got right.
        count: all items.
    """
    return _interval(discordance.only_second, discordance.only_first, count)


def _interval(gained: float, lost: float, count: float) -> tuple[float, float]:
    """The same for shares of a number of items that need not be whole."""
    tail = (1 - CONFIDENCE_LEVEL) / 4

    def bounds(number: float) -> tuple[float, float]:
        low = float(stats.beta.ppf(tail, number, count - number + 1)) if number > 0 else 0.0
        high = float(stats.beta.ppf(1 - tail, number + 1, count - number)) if number < count else 1.0
        return low, high

    (gained_low, gained_high), (lost_low, lost_high) = bounds(gained), bounds(lost)
    return gained_low - lost_high, gained_high - lost_low


def _items_needed(discordance: Discordance, count: int, margin: float) -> int:
    """The fewest items at which the same shares would pass; their gain is above -margin."""

    def passes(items: float) -> bool:
        share = items / count
        return _interval(discordance.only_second * share, discordance.only_first * share, items)[0] > -margin

    enough = float(count)
    while not passes(enough):
        enough *= 2
    too_few = enough / 2
    while enough - too_few > 0.01 * enough:
        middle = (too_few + enough) / 2
        too_few, enough = (too_few, middle) if passes(middle) else (middle, enough)
    return math.ceil(enough)


def judge_floor(estimate: Estimate, floor: float, *, right: int | None) -> Verdict:
    """Whether a score lies above the floor that was written down before.

    Args:
        estimate: the score; its interval is Student's over items or clusters.
        floor: in the unit of the score, more being better.
        right: how many of the items are right, where each is right or wrong; then the interval is exact (Clopper and
            Pearson, 1934).
    """
    if right is None:
        reach = float(stats.t.ppf((1 + CONFIDENCE_LEVEL) / 2, estimate.count - 1)) * estimate.standard_error
        low, high = estimate.value - reach, estimate.value + reach
    else:
        interval = stats.binomtest(right, estimate.count).proportion_ci(CONFIDENCE_LEVEL)
        low, high = float(interval.low), float(interval.high)
    if low > floor:
        return Verdict.PASS
    return Verdict.FAIL if high < floor else Verdict.INCONCLUSIVE


def items_to_decide(margin: float, discordance: float) -> int:
    """Items with which an equally good variant passes with `POWER`, for answers that are right or wrong.

    It counts with the interval that `judge` uses: the chances of all numbers of gained and lost items that pass, each
    item being gained or lost with half the discordance.

    Args:
        margin: the loss that still counts as equal, above 0.
        discordance: the share of items that only one side gets right, between 0 and 1.
    """

    def enough(count: int) -> bool:
        reach = 6 * math.sqrt(count * discordance / 2) + 6
        gained = np.arange(
            max(0, math.floor(count * discordance / 2 - reach)),
            min(count, math.ceil(count * discordance / 2 + reach)) + 1,
        )
        tail = (1 - CONFIDENCE_LEVEL) / 4
        low = np.where(gained > 0, stats.beta.ppf(tail, np.maximum(gained, 1), count - gained + 1), 0.0)
        high = np.where(
            gained < count, stats.beta.ppf(1 - tail, gained + 1, np.maximum(count - gained, 1)), 1.0
        )
        passing = low[:, None] - high[None, :] > -margin
        # The number gained, and of the other items the number lost.
        chance = stats.binom.pmf(gained, count, discordance / 2)[:, None] * stats.binom.pmf(
            gained[None, :], count - gained[:, None], discordance / (2 - discordance)
        )
        return float(chance[passing].sum()) >= POWER

    count = 2
    while not enough(count):
        count *= 2
    too_few = count // 2
    while count - too_few > max(1, 0.01 * count):
        middle = (too_few + count) // 2
        too_few, count = (too_few, middle) if enough(middle) else (middle, count)
    return count


def items_to_decide_mean(margin: float, deviation: float) -> int:
    """The same for a measure that is no right or wrong: the usual normal approximation.

    Args:
        margin: the loss that still counts as equal, above 0.
        deviation: of the items' paired differences, their standard deviation in the unit of the margin.
    """
    sides = float(stats.norm.ppf((1 + CONFIDENCE_LEVEL) / 2) + stats.norm.ppf(POWER))
    return max(2, math.ceil((sides * deviation / margin) ** 2))


def overall(verdicts: list[Verdict]) -> Verdict:
    """Fail where one failed, inconclusive where one is, else pass; of nothing, inconclusive."""
    if Verdict.FAIL in verdicts:
        return Verdict.FAIL
    if Verdict.INCONCLUSIVE in verdicts or not verdicts:
        return Verdict.INCONCLUSIVE
    return Verdict.PASS
