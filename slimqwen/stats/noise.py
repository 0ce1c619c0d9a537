"""Bounds of noise: how far a figure may lie from its ideal without any change, from repeats or many positions."""

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

from slimqwen.stats.intervals import CONFIDENCE_LEVEL, TooFewItemsError

COVERAGE = 0.95
"""Share of all repeats that lie within a tolerance bound."""


def upper_tolerance_bound(values: Sequence[float]) -> float:
    """The bound below which `COVERAGE` of further repeats lie, with `CONFIDENCE_LEVEL` confidence.

    The one-sided tolerance bound of a normal distribution, mean + k s with k from the noncentral t distribution (Hahn,
    Meeker and Escobar, Statistical Intervals, 2nd ed. 2017, section 4.6.3; NIST/SEMATECH e-Handbook, 7.2.6.3). Positive
    values are taken to be log-normal, because noise is a scale.

    Raises:
        TooFewItemsError: fewer than two values.
    """
    if len(values) < 2:
        raise TooFewItemsError(f"{len(values)} repeat(s) have no tolerance bound; measure at least 2")
    positive = min(values) > 0
    x = np.log(values) if positive else np.asarray(values, dtype=np.float64)
    root = math.sqrt(len(values))
    factor = stats.nct.ppf(CONFIDENCE_LEVEL, len(values) - 1, stats.norm.ppf(COVERAGE) * root) / root
    bound = float(x.mean() + factor * x.std(ddof=1))
    return math.exp(bound) if positive else bound


def lower_tolerance_bound(values: Sequence[float]) -> float:
    """The bound above which `COVERAGE` of further repeats lie; as `upper_tolerance_bound`, without logarithms.

    Raises:
        TooFewItemsError: fewer than two values.
    """
    return -upper_tolerance_bound([-value for value in values])


def quantile_interval(values: Sequence[float], share: float) -> tuple[float, float, float]:
    """The quantile with this share of many observations below, and the ends of its interval at `CONFIDENCE_LEVEL`.

    Order statistics whose ranks come from the binomial distribution, so no distribution is assumed (Hahn, Meeker and
    Escobar, section 5.2). With too few observations for a rank the end is the smallest or largest of them.

    Returns:
        Quantile, lower end, upper end.

    Raises:
        TooFewItemsError: there are no observations.
    """
    if not values:
        raise TooFewItemsError("there are no observations, so no quantile; measure at least 1")
    ordered = sorted(values)
    tail = (1 - CONFIDENCE_LEVEL) / 2
    low, high = (int(stats.binom.ppf(p, len(ordered), share)) for p in (tail, 1 - tail))
    last = len(ordered) - 1
    quantile = float(np.quantile(ordered, share))
    return quantile, ordered[max(0, min(low - 1, last))], ordered[min(high, last)]
