"""P-values, against published rules and the intervals of verdicts."""

import pytest
from scipy import stats

from slimqwen.stats import intervals, multiplicity, non_inferiority
from slimqwen.stats.estimates import Estimate
from slimqwen.stats.intervals import Discordance
from slimqwen.stats.non_inferiority import ALPHA
from slimqwen.stats.verdict import Verdict


def test_holm_multiplies_the_smallest_by_the_number_that_is_left() -> None:
    # As R: p.adjust(c(0.01, 0.04, 0.03, 0.005), "holm")
    assert multiplicity.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert multiplicity.holm([0.4, 0.9]) == pytest.approx([0.8, 0.9])
    assert multiplicity.holm([0.6, 0.7]) == [1.0, 1.0]
    assert multiplicity.holm([]) == []


@pytest.mark.parametrize(("only_first", "only_second"), [(0, 0), (5, 5), (10, 8), (30, 12), (60, 20)])
def test_a_p_value_is_the_level_at_which_the_interval_ends_at_the_margin(
    only_first: int, only_second: int
) -> None:
    pair = Discordance(only_first, only_second, 1.0)
    for margin in (0.01, 0.02, 0.04):
        p_value = non_inferiority.paired_proportion_p_value(pair, 700, margin)
        low, _ = non_inferiority.paired_proportion_interval(pair, 700)
        assert (p_value < ALPHA) == (low > -margin)
        if 1e-12 < p_value < 1:
            # Clopper and Pearson's ends at half the level each.
            gained = stats.beta.ppf(p_value / 2, only_second, 701 - only_second) if only_second else 0.0
            lost = stats.beta.ppf(1 - p_value / 2, only_first + 1, 700 - only_first)
            assert gained - lost == pytest.approx(-margin, abs=1e-6)


def test_a_figure_that_a_p_value_rejects_has_passed() -> None:
    for value, error in ((0.001, 0.0005), (0.003, 0.0001), (0.003, 0.0004), (0.0033, 0.0), (0.004, 0.0)):
        estimate = Estimate(value=value, standard_error=error, count=9)
        verdict = Verdict.from_interval(*estimate.interval, 0.0033, higher_is_better=False)
        p_value = intervals.p_value(value, error, 9, 0.0033, higher_is_better=False)
        assert (p_value <= ALPHA) == (verdict is Verdict.PASS)
