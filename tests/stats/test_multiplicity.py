"""P-values: against published rules, and how often a family of finalists promotes what lies at its margin."""

import numpy as np
import pytest
from scipy import stats

from slimqwen.stats import intervals, multiplicity, non_inferiority
from slimqwen.stats.estimates import Estimate
from slimqwen.stats.intervals import Discordance
from slimqwen.stats.non_inferiority import ALPHA
from slimqwen.stats.verdict import Verdict

FAMILIES = 5_000


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


def test_a_ratio_at_its_limit_is_rejected_as_often_as_stated() -> None:
    """Acceptance lengths of 18 groups, the variant's 3 % shorter; both sides of a group go up and down together."""
    rng = np.random.default_rng(8)
    rejected = 0
    for _ in range(FAMILIES):
        ease = rng.normal(0, 0.3, 18)
        first, second = (scale * (4.5 + ease + rng.normal(0, 0.1, 18)) for scale in (1, 0.97))
        drafts = rng.integers(200, 400, 18)
        rejected += intervals.paired_ratio_p_value(first, second, drafts, drafts, 0.97) <= ALPHA
    rate = rejected / (FAMILIES)
    assert rate == pytest.approx(ALPHA, abs=3 * (ALPHA / (FAMILIES)) ** 0.5)


def test_families_at_the_margin_promote_at_most_as_often_as_stated() -> None:
    """Finalists that lose exactly the margin, as gates see them: one task decides, the others are equally good.

    The rate of a family has to stay at or below alpha; without Holm it does not, so the simulation can tell.
    """
    rng = np.random.default_rng(20261123)
    finalists, items, margin, discordance = 5, 700, 0.04, 0.06
    # Of each item: only the baseline is right, only the finalist, or both or neither.
    shares = [(discordance + margin) / 2, (discordance - margin) / 2, 1 - discordance]
    cells = rng.multinomial(items, shares, (FAMILIES, finalists))
    known: dict[tuple[int, int], float] = {}
    for lost, gained, _ in np.unique(cells.reshape(-1, 3), axis=0).tolist():
        pair = Discordance(lost, gained, 1.0)
        known[lost, gained] = non_inferiority.paired_proportion_p_value(pair, items, margin)
    p_values = np.array([[known[lost, gained] for lost, gained, _ in family] for family in cells.tolist()])
    adjusted = np.array([multiplicity.holm(family) for family in p_values.tolist()])
    rate = float((adjusted <= ALPHA).any(1).mean())
    each = float((p_values <= ALPHA).mean())
    without = float((p_values <= ALPHA).any(1).mean())
    assert 0 < rate <= ALPHA
    assert each <= ALPHA
    assert without > rate


def test_a_figure_that_a_p_value_rejects_has_passed() -> None:
    for value, error in ((0.001, 0.0005), (0.003, 0.0001), (0.003, 0.0004), (0.0033, 0.0), (0.004, 0.0)):
        estimate = Estimate(value=value, standard_error=error, count=9)
        verdict = Verdict.from_interval(*estimate.interval, 0.0033, higher_is_better=False)
        p_value = intervals.p_value(value, error, 9, 0.0033, higher_is_better=False)
        assert (p_value <= ALPHA) == (verdict is Verdict.PASS)
