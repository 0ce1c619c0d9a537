"""Non-inferiority: does a paired difference rule out a loss beyond the margin that was fixed beforehand?"""

from dataclasses import dataclass

import scipy  # its parts are imported when they are used: they take a second
from numpy.typing import ArrayLike

from slimqwen.stats import sequential
from slimqwen.stats.estimates import CONFIDENCE_LEVEL, Estimate
from slimqwen.stats.intervals import student_half_width
from slimqwen.stats.verdict import Verdict


@dataclass(frozen=True)
class Judgement:
    """A verdict and its grounds. Gains are in the unit of the measure; a loss is negative.

    Attributes:
        verdict: pass where the whole interval lies above -margin.
        low, high: ends of the interval of the gain, which holds for all looks at the items so far.
        margin: the largest loss that still counts as equal, 0 or above.
        p_value: of the hypothesis that the loss is the margin or more, one-sided and valid for all looks so far.
    """

    verdict: Verdict
    low: float
    high: float
    margin: float
    p_value: float


def judge_loss(
    gains: ArrayLike,
    weights: ArrayLike | None,
    *,
    first_look: int,
    margin: float,
    largest_bet_share: float = sequential.EVEN_SHARE,
) -> Judgement:
    """Judge, for this look and all before it at once, whether the second side scores worse than the first.

    Args:
        gains: what the second side gained on each item or cluster that both have, in the order of the looks, which was
            fixed before the first one.
        weights: weight of each gain; None where items are simply right or wrong, so that a gain is -1, 0 or 1.
        first_look: number of gains at the first look.
        margin: the largest loss that still counts as equal.
        largest_bet_share: `sequential.RARE_SHARE` if only few right-or-wrong items differ between the sides.

    Raises:
        TooFewItemsError: the first look at items with weights has fewer than two.
    """
    if weights is None:
        low, high = sequential.answers_interval(gains, largest_bet_share)
        p_value = float(sequential.answers_p_value(gains, -margin, largest_bet_share)[0])
    else:
        low, high = sequential.mean_interval(gains, weights, first_look)
        p_value = sequential.mean_p_value(gains, weights, first_look, -margin)
    verdict = Verdict.from_interval(low, high, -margin, higher_is_better=True, limit_passes=False)
    return Judgement(verdict, low, high, margin, p_value)


def judge_floor(estimate: Estimate, floor: float, *, right: int | None) -> Verdict:
    """Judge whether a score lies above `floor`: pass or fail if its whole interval does or does not, else inconclusive.

    Args:
        estimate: the score.
        floor: lowest acceptable score, in its unit; more is better.
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
