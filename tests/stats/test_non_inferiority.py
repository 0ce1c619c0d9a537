import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from slimqwen.stats import intervals, non_inferiority
from slimqwen.stats.estimates import Difference, Estimate
from slimqwen.stats.intervals import Discordance
from slimqwen.stats.verdict import Verdict


def judged(value, low, high, *, higher_is_better=True):
    difference = Difference(value, (high - low) / 4, low, high, 100)
    return non_inferiority.judge_loss(difference, None, margin=0.04, higher_is_better=higher_is_better)


def judged_answers(first, second):
    difference, discordance = intervals.paired_difference(first, second), intervals.mcnemar(first, second)
    return non_inferiority.judge_loss(difference, discordance, margin=0.04, higher_is_better=True)


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (-0.03, 0.01, Verdict.PASS),
        (-0.05, 0.01, Verdict.INCONCLUSIVE),
        (-0.09, -0.03, Verdict.INCONCLUSIVE),
        (-0.09, -0.05, Verdict.FAIL),
        (0.01, 0.02, Verdict.PASS),
        # An end exactly at the margin shows nothing.
        (-0.04, 0.01, Verdict.INCONCLUSIVE),
        (-0.09, -0.04, Verdict.INCONCLUSIVE),
    ],
)
def test_the_whole_interval_has_to_lie_on_one_side_of_the_margin(low, high, said):
    assert judged((low + high) / 2, low, high).verdict is said
    # The same where less is better.
    assert judged(-(low + high) / 2, -high, -low, higher_is_better=False).verdict is said


def test_an_inconclusive_run_says_how_many_items_would_pass():
    result = judged(-0.01, -0.05, 0.03)
    assert result.verdict is Verdict.INCONCLUSIVE
    assert result.items_needed == pytest.approx(100 * (0.04 / 0.03) ** 2, abs=1)
    # Beyond the margin already: more of the same would fail.
    assert judged(-0.05, -0.09, -0.01).items_needed is None
    assert judged(0.0, -0.01, 0.01).items_needed is None


def test_a_handful_of_equal_answers_does_not_pass():
    """Where nothing differs a bootstrap's interval is a point, however few the items."""
    for items, verdict in ((20, Verdict.INCONCLUSIVE), (1000, Verdict.PASS)):
        same = [True] * items
        difference = intervals.paired_difference(same, same)
        assert (difference.low, difference.high) == (0, 0)
        assert judged_answers(same, same).verdict is verdict


@given(st.integers(0, 200), st.integers(0, 200), st.integers(400, 2000))
def test_the_exact_interval_holds_the_difference_and_turns_with_the_sides(gained, lost, count):
    low, high = non_inferiority.paired_proportion_interval(Discordance(lost, gained, 1.0), count)
    assert -1 <= low <= (gained - lost) / count <= high <= 1
    assert non_inferiority.paired_proportion_interval(Discordance(gained, lost, 1.0), count) == pytest.approx(
        (-high, -low)
    )


@pytest.mark.parametrize("count", [20, 300])
def test_the_exact_interval_is_made_of_clopper_and_pearsons(count):
    gained, lost = (stats.binomtest(number, count).proportion_ci(0.975, method="exact") for number in (3, 7))
    result = non_inferiority.paired_proportion_interval(Discordance(7, 3, 1.0), count)
    assert result == pytest.approx((gained.low - lost.high, gained.high - lost.low))


def test_as_many_items_as_an_inconclusive_run_asks_for_do_pass():
    first = [True] * 40
    second = [False, *first[1:]]

    def repeated(times):
        return judged_answers(first * times, second * times)

    needed = repeated(1).items_needed
    assert repeated(1).verdict is Verdict.INCONCLUSIVE
    assert repeated(-(-needed // 40)).verdict is Verdict.PASS
    assert repeated(needed // 40 - 2).verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(("margin", "discordance"), [(0.1, 0.02), (0.1, 0.9), (0.5, 0.9)])
def test_the_planned_number_of_items_is_the_fewest_that_pass_with_the_planned_power(margin, discordance):
    """Over all numbers of gained and lost items; the power is no smooth curve, so any number just below may fail."""

    def power(items):
        numbers = np.arange(items + 1)
        # An end that is not defined is that of no item or of all items.
        low = np.nan_to_num(stats.beta.ppf(0.0125, numbers, items - numbers + 1), nan=0.0)
        high = np.nan_to_num(stats.beta.ppf(0.9875, numbers + 1, items - numbers), nan=1.0)
        gained, lost = np.nonzero(low[:, None] - high[None, :] > -margin)
        outcomes = np.stack([gained, lost, items - gained - lost], axis=-1)
        shares = [discordance / 2, discordance / 2, 1 - discordance]
        return stats.multinomial.pmf(outcomes, items, shares).sum()

    count = non_inferiority.items_to_decide(margin, discordance)
    assert power(count) >= non_inferiority.POWER
    assert any(power(count - fewer) < non_inferiority.POWER for fewer in range(1, max(2, count // 100 + 1)))


def test_the_p_value_of_answers_that_never_differ_is_that_of_the_losses_not_seen():
    # The exact upper end of none of n at the level p / 2 is 1 - (p / 2) ** (1 / n).
    never = Discordance(0, 0, 1.0)
    assert non_inferiority.paired_proportion_p_value(never, 100, 0.04) == pytest.approx(2 * 0.96**100)
    assert non_inferiority.paired_proportion_p_value(never, 10, 0.04) == 1
    assert non_inferiority.paired_proportion_p_value(never, 1000, 0.04) == 1e-12


def test_fewer_differences_and_wider_margins_take_fewer_items():
    assert non_inferiority.items_to_decide(0.04, 0.05) < non_inferiority.items_to_decide(0.04, 0.1)
    assert non_inferiority.items_to_decide(0.04, 0.1) < non_inferiority.items_to_decide(0.02, 0.1)
    # (1.95996 + 1.70604)² is 13.44.
    assert non_inferiority.items_to_decide_mean(margin=0.5, deviation=1.0) == 54
    assert non_inferiority.items_to_decide_mean(margin=0.1, deviation=1.0) == 1344


@pytest.mark.parametrize(
    ("estimate", "right", "said"),
    [
        # Clopper and Pearson of 70 of 100: 0.600 to 0.788.
        (Estimate(0.7, 0.0, 100), 70, {0.59: "pass", 0.61: "inconclusive", 0.79: "fail"}),
        # All of five right tells little: 0.478 to 1.
        (Estimate(1.0, 0.0, 5), 5, {0.47: "pass", 0.49: "inconclusive"}),
        # Student's with 9 degrees of freedom: 2.262 standard errors to each side.
        (Estimate(0.5, 0.1, 10), None, {0.27: "pass", 0.28: "inconclusive", 0.73: "fail"}),
    ],
)
def test_a_score_is_above_its_floor_only_with_its_whole_interval(estimate, right, said):
    for floor, verdict_said in said.items():
        assert non_inferiority.judge_floor(estimate, floor, right=right) == verdict_said


def test_a_measured_loss_of_exactly_the_margin_is_passed_by_no_number_of_items():
    result = judged(-0.04, -0.08, 0.0)
    assert (result.verdict, result.items_needed) == (Verdict.INCONCLUSIVE, None)


def test_the_exact_interval_reaches_its_end_where_one_side_lost_every_item():
    # The exact lower end of 20 of 20, and 1 less the upper end of none of 20, is (p / 2) ** (1 / 20).
    end = 0.0125 ** (1 / 20)
    interval = non_inferiority.paired_proportion_interval(Discordance(20, 0, 1.0), 20)
    assert interval == pytest.approx((-1, 1 - 2 * end))


def test_no_plan_has_fewer_than_the_two_items_of_an_interval():
    assert non_inferiority.items_to_decide_mean(margin=10.0, deviation=0.1) == 2
    assert non_inferiority.items_to_decide(margin=1.0, discordance=0.01) == 2
