"""P-values, against published rules and the intervals of verdicts."""

import pytest

from slimqwen.stats import intervals, multiplicity
from slimqwen.stats.estimates import Estimate
from slimqwen.stats.sequential import ALPHA
from slimqwen.stats.verdict import Verdict


def test_holm_multiplies_the_smallest_by_the_number_that_is_left() -> None:
    # As R: p.adjust(c(0.01, 0.04, 0.03, 0.005), "holm")
    assert multiplicity.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert multiplicity.holm([0.4, 0.9]) == pytest.approx([0.8, 0.9])
    assert multiplicity.holm([0.6, 0.7]) == [1.0, 1.0]
    assert multiplicity.holm([]) == []


def test_a_figure_that_a_p_value_rejects_has_passed() -> None:
    for value, error in ((0.001, 0.0005), (0.003, 0.0001), (0.003, 0.0004), (0.0033, 0.0), (0.004, 0.0)):
        estimate = Estimate(value=value, standard_error=error, count=9)
        verdict = Verdict.from_interval(*estimate.interval, 0.0033, higher_is_better=False)
        p_value = intervals.p_value(value, error, 9, 0.0033, higher_is_better=False)
        assert (p_value <= ALPHA) == (verdict is Verdict.PASS)
