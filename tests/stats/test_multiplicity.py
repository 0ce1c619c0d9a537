"""P-values, against published rules and the intervals of verdicts."""

import numpy as np
import pytest
from scipy import stats

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


def test_the_levels_of_all_tries_share_one_error() -> None:
    missed = [1 - multiplicity.confidence_of_try(number) for number in range(1, 10_000)]
    assert missed[0] == pytest.approx(0.8 * 2 * ALPHA)
    assert missed == sorted(missed, reverse=True)
    assert sum(missed) == pytest.approx(2 * ALPHA, rel=1e-3)
    assert sum(missed) < 2 * ALPHA


@pytest.mark.parametrize("rounds", [3, 5])
def test_whoever_times_again_until_faster_is_wrong_no_more_often_than_alpha(rounds: int) -> None:
    """20,000 people time two equally fast variants up to 20 times; one level for each try deceives many of them."""
    runs, tries = 20_000, 20
    logarithms = np.random.default_rng(3).normal(size=(runs, tries, rounds))
    figures = logarithms.mean(-1) / (logarithms.std(-1, ddof=1) / np.sqrt(rounds))

    def share_deceived(levels: list[float]) -> float:
        return float((figures > stats.t.ppf((1 + np.asarray(levels)) / 2, rounds - 1)).any(axis=1).mean())

    spent = [multiplicity.confidence_of_try(number) for number in range(1, tries + 1)]
    assert 0.8 * ALPHA < share_deceived(spent) <= ALPHA + 3 * np.sqrt(ALPHA * (1 - ALPHA) / runs)
    assert share_deceived([1 - 2 * ALPHA] * tries) > 0.3
