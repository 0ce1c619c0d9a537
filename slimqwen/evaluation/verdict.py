"""Non-inferiority: does a paired difference rule out a loss beyond the margin that was written down before?

Three answers, because a run that could not have seen such a loss says nothing: it passes only where the whole interval
lies within the margin, fails only where the whole interval lies beyond it.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

from scipy import stats

from slimqwen.evaluation.statistics import CONFIDENCE_LEVEL, Difference, Discordance


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


def overall(verdicts: list[Verdict]) -> Verdict:
    """Fail where one failed, inconclusive where one is, else pass; of nothing, inconclusive."""
    if Verdict.FAIL in verdicts:
        return Verdict.FAIL
    if Verdict.INCONCLUSIVE in verdicts or not verdicts:
        return Verdict.INCONCLUSIVE
    return Verdict.PASS
