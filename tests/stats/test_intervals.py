import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from slimqwen.stats import intervals

scores = st.lists(st.floats(-100, 100), min_size=2, max_size=40)
answers = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60)


@given(scores)
def test_unweighted_mean_has_the_textbook_standard_error(values):
    estimate = intervals.mean(values)
    assert estimate.value == pytest.approx(np.mean(values), abs=1e-9)
    assert estimate.standard_error == pytest.approx(stats.sem(values), abs=1e-9)
    assert estimate.count == len(values)


def test_weighted_mean_is_total_over_total():
    # Three documents of 10, 30 and 60 bytes with 20, 30 and 90 bits.
    estimate = intervals.mean([2.0, 1.0, 1.5], [10, 30, 60])
    assert estimate.value == pytest.approx(140 / 100)
    assert estimate.standard_error == pytest.approx(math.sqrt(1.5 * (6**2 + 12**2 + 6**2)) / 100)


@given(scores, st.floats(0.1, 50))
def test_scale_of_the_weights_does_not_matter(values, factor):
    weights = np.arange(1, len(values) + 1)
    plain, scaled = intervals.mean(values, weights), intervals.mean(values, weights * factor)
    assert scaled.value == pytest.approx(plain.value, abs=1e-9)
    assert scaled.standard_error == pytest.approx(plain.standard_error, abs=1e-9)


@pytest.mark.parametrize("values", [[], [1.0]])
def test_one_item_has_no_standard_error(values):
    with pytest.raises(intervals.TooFewItemsError, match="at least 2"):
        intervals.mean(values)


def test_paired_difference_sees_what_unpaired_scores_hide():
    first = np.linspace(0, 100, 50)
    difference = intervals.paired_difference(first, first + 0.5 + 0.01 * np.sin(first))
    assert difference.low > 0.49
    assert difference.high < 0.51
    assert difference.standard_error < 0.01 < stats.sem(first)


@settings(max_examples=15)
@given(scores)
def test_paired_difference_with_itself_is_zero(values):
    difference = intervals.paired_difference(values, values)
    assert (difference.value, difference.standard_error, difference.low, difference.high) == (0, 0, 0, 0)


def test_weights_count_in_the_difference():
    difference = intervals.paired_difference([0, 0, 0], [1, 0, 0], [8, 1, 1])
    assert difference.value == pytest.approx(0.8)


@given(answers)
def test_mcnemar_is_the_binomial_test_of_the_discordant_pairs(pairs):
    first, second = map(list, zip(*pairs, strict=True))
    result = intervals.mcnemar(first, second)
    discordant = result.only_first + result.only_second
    assert discordant == sum(a != b for a, b in pairs)
    assert result.only_first - result.only_second == sum(first) - sum(second)
    expected = stats.binomtest(result.only_second, discordant).pvalue if discordant else 1.0
    assert result.p_value == pytest.approx(expected)


def test_a_known_ratio_of_rounds():
    found = intervals.ratio_of_rounds([2.0, 8.0], [1.0, 1.0], in_turns=True)
    t = float(stats.t.ppf(0.975, 1))
    assert found.value == pytest.approx(4)
    assert (found.low, found.high) == pytest.approx((4 / 2**t, 4 * 2**t))
    welch = stats.ttest_ind(np.log([2.0, 8.0, 3.0]), np.log([1.0, 1.5]), equal_var=False)
    found = intervals.ratio_of_rounds([2.0, 8.0, 3.0], [1.0, 1.5], in_turns=False)
    assert (found.low, found.high) == pytest.approx(tuple(np.exp(welch.confidence_interval(0.95))))


@pytest.mark.parametrize("in_turns", [True, False])
def test_rounds_that_agree_have_a_ratio_without_width(in_turns):
    found = intervals.ratio_of_rounds([3.0, 3.0], [2.0, 2.0], in_turns=in_turns)
    assert (found.value, found.low, found.high) == pytest.approx((1.5, 1.5, 1.5))


@pytest.mark.parametrize(
    ("first", "second", "error"),
    [
        ([1.0], [1.0], intervals.TooFewItemsError),
        ([1.0, 0.0], [1.0, 1.0], ValueError),
        ([1.0, 1.0], [1.0, 1.0, 1.0], ValueError),
    ],
)
def test_rounds_without_a_ratio_are_refused(first, second, error):
    with pytest.raises(error):
        intervals.ratio_of_rounds(first, second, in_turns=True)


def test_a_single_round_is_taken_request_by_request():
    requests = {0: [10.0, 11.0, 12.0, 13.0]}
    found, rounds = intervals.ratio_by_round(requests, {0: [5.0, 5.5, 6.0, 6.5]}, in_turns=True)
    assert rounds == 0
    assert found == intervals.ratio_of_medians(requests[0], [5.0, 5.5, 6.0, 6.5])


@pytest.mark.parametrize("pair", [intervals.paired_difference, intervals.mcnemar])
def test_unequal_sides_cannot_be_paired(pair):
    with pytest.raises(ValueError, match=r"differ in number|shorter"):
        pair([1, 0, 1], [1, 0])


def test_repeats_of_the_same_answers_change_nothing():
    """As independent items they would shrink the error with the root of their number."""
    first, second = np.array([1.0, 0.0, 3.0, 2.0]), np.array([2.0, 0.5, 1.0, 2.5])
    clusters = np.repeat(range(4), 3).tolist()
    once = intervals.paired_difference(first, second)
    again = intervals.paired_difference(np.repeat(first, 3), np.repeat(second, 3), clusters=clusters)
    assert again.count == 4
    for name in ("value", "standard_error", "low", "high"):
        assert getattr(again, name) == pytest.approx(getattr(once, name), abs=1e-9)


def test_a_cluster_weighs_what_its_items_weigh_wherever_they_stand():
    means, weights = intervals.by_cluster([1.0, 5.0, 4.0, 2.0], [1, 2, 3, 4], ["a", "b", "a", "b"])
    assert list(means) == [pytest.approx(13 / 4), pytest.approx(18 / 6)]
    assert list(weights) == [4, 6]
    estimate = intervals.mean([1.0, 5.0, 4.0, 2.0], [1, 2, 3, 4], ["a", "b", "a", "b"])
    assert estimate.value == pytest.approx(3.1)
    assert estimate.standard_error == pytest.approx(math.sqrt(2 * 2 * 0.6**2) / 10)
    with pytest.raises(ValueError, match="differ in number"):
        intervals.by_cluster([1.0, 2.0], None, ["a"])
    with pytest.raises(intervals.TooFewItemsError):
        intervals.mean([1.0, 2.0], clusters=["a", "a"])


@pytest.mark.parametrize(("higher_is_better", "side"), [(True, "greater"), (False, "less")])
def test_a_p_value_is_that_of_students_test_of_one_sample(higher_is_better, side):
    values = np.random.default_rng(5).normal(0.3, 1, 25)
    mean = intervals.mean(values)
    for limit in (0.0, 0.7):
        found = intervals.p_value(
            mean.value, mean.standard_error, mean.count, limit, higher_is_better=higher_is_better
        )
        assert found == pytest.approx(stats.ttest_1samp(values, limit, alternative=side).pvalue)


def test_an_estimate_without_error_is_certain_of_its_side():
    for higher_is_better, on_the_right, on_the_wrong in ((True, 0.3, 0.1), (False, 0.1, 0.3)):
        assert intervals.p_value(on_the_right, 0.0, 9, 0.2, higher_is_better=higher_is_better) == 0
        assert intervals.p_value(on_the_wrong, 0.0, 9, 0.2, higher_is_better=higher_is_better) == 1


def test_the_p_value_of_a_ratio_is_that_of_the_second_side_less_the_limits_share_of_the_first():
    rng = np.random.default_rng(6)
    first = rng.normal(10, 1, 30)
    second = first + rng.normal(0, 1, 30)
    even = np.ones(30)
    expected = stats.ttest_1samp(second - 0.97 * first, 0, alternative="greater").pvalue
    assert intervals.paired_ratio_p_value(first, second, even, even, 0.97) == pytest.approx(expected)
    # By hand: means 2 and 3.5, residuals 0.125 and -0.125, so Student's t is 1.5 / 0.25 with one degree of freedom.
    by_hand = intervals.paired_ratio_p_value([1, 3], [2, 4], [1, 1], [1, 3], 1.0)
    assert by_hand == pytest.approx(stats.t.sf(6, 1))


def test_a_ratio_of_weighted_means_moves_with_units_and_not_with_the_scale_of_weights():
    first, second = np.array([1.0, 3.0, 2.0, 4.0]), np.array([2.0, 4.0, 5.0, 7.0])
    weights, others = np.array([1, 1, 2, 4]), np.array([1, 3, 2, 2])
    found = intervals.paired_ratio(first, second, weights, others)
    # Means 24 / 8 and 38 / 8.
    assert found.value == pytest.approx(38 / 24)
    assert found.low < found.value < found.high
    assert intervals.paired_ratio(first, second, 10 * weights, 2 * others) == found
    # Units are drawn with both of their sides.
    steady = intervals.paired_ratio(first, 2 * first, weights, weights)
    assert (steady.value, steady.low, steady.high) == pytest.approx((2, 2, 2))
    with pytest.raises(ValueError, match="differ in number"):
        intervals.paired_ratio([1, 2], [1, 2, 3], [1, 1], [1, 1, 1])


def test_a_percentile_over_groups_has_the_spread_of_whole_groups():
    alike = intervals.percentile_over_groups([[0.0, 10.0]] * 5, 90)
    assert (alike.value, alike.standard_error, alike.count) == (10, 0, 5)
    # Of two groups half of the draws are the mean of both, a quarter each of them: a deviation of 0.354.
    apart = intervals.percentile_over_groups([[0.0], [1.0]], 50)
    assert apart.value == 0.5
    assert apart.standard_error == pytest.approx(math.sqrt(1 / 8), rel=0.1)
    # The draws are those of the fixed seed.
    rng = np.random.default_rng(intervals.BOOTSTRAP_SEED)
    medians = [float(rng.integers(2, size=2).mean()) for _ in range(200)]
    assert apart.standard_error == pytest.approx(statistics.stdev(medians))
    with pytest.raises(intervals.TooFewItemsError):
        intervals.percentile_over_groups([[0.0, 1.0]], 50)


def test_several_rounds_are_compared_by_their_medians_and_in_turns_only_where_both_have_them():
    numerator = {1: [8.0, 9.0, 10.0], 2: [11.0, 12.0, 90.0], 3: [7.0, 7.0]}
    denominator = {3: [2.0, 2.0], 1: [3.0, 3.0], 4: [5.0, 5.0]}
    found, rounds = intervals.ratio_by_round(numerator, denominator, in_turns=True)
    assert rounds == 2
    assert found == intervals.ratio_of_rounds([9, 7], [3, 2], in_turns=True)
    found, rounds = intervals.ratio_by_round(numerator, denominator, in_turns=False)
    assert rounds == 3
    assert found == intervals.ratio_of_rounds([9, 12, 7], [3, 2, 5], in_turns=False)


def test_an_item_is_drawn_with_its_weight():
    """Where small items differ most, weights drawn apart from them would move the interval off the mean."""
    rng = np.random.default_rng(8)
    weights = rng.uniform(1, 9, 400)
    second = 1 / weights + rng.normal(0, 0.05, 400)
    found = intervals.paired_difference(np.zeros(400), second, weights)
    normal = stats.norm.interval(0.95, found.value, found.standard_error)
    assert (found.low, found.high) == pytest.approx(normal, abs=0.2 * found.standard_error)


def test_a_bootstrap_interval_is_that_of_the_committed_records():
    """Its seed, number of draws and order of draws stay, or committed records could not be computed again."""
    shown = [0.3, -1.2, 0.8, 2.5, -0.4, 1.1, 0.06, 0.333, 1.71, 2.2, -0.77, 0.123, -2.21]
    found = intervals.paired_difference(np.zeros(len(shown)), shown)
    assert (found.low, found.high) == pytest.approx((-0.35935769230769, 1.04257692307692), abs=1e-12)
    # Of two sides the draws also depend on how many are made at once.
    ratio = intervals.ratio_of_medians(
        [0.31, 1.27, 0.83, 2.59, 0.47, 1.13, 0.061], [0.333, 1.71, 2.2, 0.77, 0.123, 2.21]
    )
    assert ratio.value == pytest.approx(0.83 / 1.24)
    assert (ratio.low, ratio.high) == pytest.approx((0.15856777493606, 3.81381381381381), abs=1e-12)
