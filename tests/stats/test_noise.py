import math

import numpy as np
import pytest

from slimqwen.stats import noise
from slimqwen.stats.intervals import TooFewItemsError


def test_the_tolerance_bound_uses_the_published_factors() -> None:
    """One-sided factors k for 95 % of the population with 95 % confidence: n = 5: 4.203, n = 10: 2.911."""
    for count, factor in ((5, 4.203), (10, 2.911)):
        values = [float(number) for number in range(-1, count - 1)]
        mean, deviation = np.mean(values), np.std(values, ddof=1)
        assert noise.upper_tolerance_bound(values) == pytest.approx(mean + factor * deviation, rel=1e-3)
        assert noise.lower_tolerance_bound(values) == pytest.approx(mean - factor * deviation, rel=1e-3)


def test_equal_repeats_have_no_spread() -> None:
    assert noise.upper_tolerance_bound([3e-5] * 5) == pytest.approx(3e-5)
    assert noise.lower_tolerance_bound([1.0] * 5) == 1.0
    with pytest.raises(TooFewItemsError, match="measure at least 2"):
        noise.upper_tolerance_bound([1.0])


def test_the_tolerance_bound_covers_as_often_as_it_promises() -> None:
    rng = np.random.default_rng(1)
    limit = math.exp(1.6449)  # 95 % of a log-normal distribution lie below
    held = [noise.upper_tolerance_bound(list(rng.lognormal(size=5))) >= limit for _ in range(2000)]
    assert np.mean(held) == pytest.approx(0.95, abs=0.015)


def test_the_interval_of_a_quantile_covers_it() -> None:
    rng = np.random.default_rng(2)
    held = []
    for _ in range(500):
        _, low, high = noise.quantile_interval(list(rng.uniform(size=2000)), 0.99)
        held.append(low <= 0.99 <= high)
    assert np.mean(held) >= 0.94


def test_few_observations_end_at_the_largest() -> None:
    assert noise.quantile_interval([1.0, 3.0, 2.0], 0.999)[2] == 3.0
    with pytest.raises(TooFewItemsError):
        noise.quantile_interval([], 0.5)
