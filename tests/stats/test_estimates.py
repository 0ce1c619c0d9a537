"""Figures with their uncertainty."""

import pytest

from slimqwen.stats.estimates import Estimate


def test_the_interval_of_an_estimate_reaches_196_hundredths_of_its_standard_error():
    assert Estimate(1.0, 0.5, 9).interval == pytest.approx((1 - 0.979982, 1 + 0.979982), abs=1e-6)
