"""Several tests at once: p-values against published rules, and how often a family promotes what lies at its margin."""

import math

import numpy as np
import pytest
from scipy import stats

from slimqwen.stats import intervals, multiplicity, non_inferiority
from slimqwen.stats.estimates import Estimate, Z
from slimqwen.stats.intervals import Discordance
from slimqwen.stats.non_inferiority import ALPHA
from slimqwen.stats.verdict import Verdict

FAMILIES = 20_000


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


def test_a_mean_at_its_limit_is_rejected_as_often_as_stated_and_its_interval_is_too_sure() -> None:
    rng = np.random.default_rng(7)
    samples = rng.normal(-0.15, 0.27, (FAMILIES, 37))
    means, errors = samples.mean(1), samples.std(1, ddof=1) / math.sqrt(37)
    p_values = [
        intervals.p_value(mean, error, 37, -0.15, higher_is_better=True)
        for mean, error in zip(means.tolist(), errors.tolist(), strict=True)
    ]
    within = 3 * (ALPHA / FAMILIES) ** 0.5
    assert float(np.mean([each <= ALPHA for each in p_values])) == pytest.approx(ALPHA, abs=within)
    assert float(np.mean(means - Z * errors > -0.15)) > ALPHA + within
    # The same test from the other side, in the unit of a loss.
    assert intervals.p_value(-means[0], errors[0], 37, 0.15, higher_is_better=False) == pytest.approx(
        p_values[0]
    )


def test_a_ratio_at_its_limit_is_rejected_as_often_as_stated() -> None:
    """Acceptance lengths of 18 groups, the variant's 3 % shorter; both sides of a group go up and down together."""
    rng = np.random.default_rng(8)
    rejected = 0
    for _ in range(FAMILIES // 4):
        ease = rng.normal(0, 0.3, 18)
        first, second = (scale * (4.5 + ease + rng.normal(0, 0.1, 18)) for scale in (1, 0.97))
        drafts = rng.integers(200, 400, 18)
        rejected += intervals.paired_ratio_p_value(first, second, drafts, drafts, 0.97) <= ALPHA
    rate = rejected / (FAMILIES // 4)
    assert rate == pytest.approx(ALPHA, abs=3 * (ALPHA / (FAMILIES // 4)) ** 0.5)


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


def test_holm_spends_the_whole_level_on_exact_p_values() -> None:
    """Uniform p-values are those of exact tests at the margin: nothing is conservative but Holm itself."""
    rng = np.random.default_rng(5)
    p_values = rng.uniform(size=(FAMILIES, 4))
    rate = float(np.mean([min(multiplicity.holm(family)) <= ALPHA for family in p_values.tolist()]))
    exact = 1 - (1 - ALPHA / 4) ** 4
    assert rate == pytest.approx(exact, abs=3 * (exact / FAMILIES) ** 0.5)
    assert float((p_values <= ALPHA).any(1).mean()) > 3 * ALPHA
    # Worse finalists beside better ones: a better one that is promoted leaves the others the level of a smaller family.
    p_values[:, 0] = 1e-9
    wrongly = [multiplicity.holm(family)[1:] for family in p_values.tolist()]
    assert float(np.mean([min(each) <= ALPHA for each in wrongly])) <= ALPHA + 3 * (ALPHA / FAMILIES) ** 0.5


def test_finalists_that_share_a_baseline_promote_no_more_often() -> None:
    """Means at the margin over the same few items: what all have in common is the baseline's noise."""
    rng = np.random.default_rng(6)
    items, finalists, margin, families = 37, 3, 0.15, FAMILIES // 4
    baseline = rng.normal(0, 0.2, (families, 1, items))
    differences = rng.normal(-margin, 0.2, (families, finalists, items)) - baseline
    means, errors = differences.mean(2), differences.std(2, ddof=1) / math.sqrt(items)
    promoted = 0
    for family in zip(means.tolist(), errors.tolist(), strict=True):
        p_values = [
            intervals.p_value(mean, error, items, -margin, higher_is_better=True)
            for mean, error in zip(*family, strict=True)
        ]
        promoted += min(multiplicity.holm(p_values)) <= ALPHA
    assert 0 < promoted / families <= ALPHA


def test_a_figure_that_a_p_value_rejects_has_passed() -> None:
    for value, error in ((0.001, 0.0005), (0.003, 0.0001), (0.003, 0.0004), (0.0033, 0.0), (0.004, 0.0)):
        estimate = Estimate(value=value, standard_error=error, count=9)
        verdict = Verdict.from_interval(*estimate.interval, 0.0033, higher_is_better=False)
        assert (estimate.p_value(0.0033) <= ALPHA) == (verdict is Verdict.PASS)
