import numpy as np
import pytest
from scipy import stats

from slimqwen.stats import sequential
from slimqwen.stats.sequential import ALPHA

RUNS, ITEMS = 20_000, 2_000
MARGIN = 0.05
ALLOWED = ALPHA + 3 * np.sqrt(ALPHA * (1 - ALPHA) / RUNS)


def answers(runs, items, gained, lost, seed=7):
    """Differences of right-or-wrong answers: 1 with the probability `gained`, -1 with `lost`."""
    draws = np.random.default_rng(seed).random((runs, items), dtype=np.float32)
    return (draws < gained).astype(np.int8) - (draws > 1 - lost).astype(np.int8)


@pytest.mark.parametrize("gained", [0.0, 0.025, 0.075], ids=["losses alone", "10 % differ", "20 % differ"])
def test_a_loss_of_the_margin_passes_at_any_look_no_more_often_than_alpha(gained):
    """The capital is looked at after every item, so all looks at every 20 items are among them."""
    passes = 0
    for part in np.array_split(answers(RUNS, ITEMS, gained, gained + MARGIN), 100):
        passes += int((sequential.answers_p_value(part, -MARGIN) <= ALPHA).sum())
    assert 0 < passes / RUNS <= ALLOWED


def test_a_mean_at_the_limit_passes_at_any_look_no_more_often_than_alpha():
    values = np.random.default_rng(11).normal(-MARGIN, 1.0, (2_000, ITEMS))
    passes = sum(sequential.mean_p_value(row, np.ones(ITEMS), 40, -MARGIN) <= ALPHA for row in values)
    assert 0 < passes / 2_000 <= ALPHA + 3 * np.sqrt(ALPHA * (1 - ALPHA) / 2_000)


def test_the_simulation_sees_fixed_intervals_that_are_looked_at_again_and_again():
    """Control: intervals that hold for one look pass more often than alpha with a look every 20 items."""
    lost = answers(1_000, ITEMS, 0.0, MARGIN) == -1
    means = np.random.default_rng(11).normal(-MARGIN, 1.0, (1_000, ITEMS))
    passed = np.zeros((2, 1_000), dtype=bool)
    for count in range(20, ITEMS + 1, 20):
        high = stats.beta.ppf(
            1 - ALPHA / 2, lost[:, :count].sum(axis=1) + 1, count - lost[:, :count].sum(axis=1)
        )
        errors = stats.sem(means[:, :count], axis=1) * stats.t.ppf(1 - ALPHA, count - 1)
        passed |= [-high > -MARGIN, means[:, :count].mean(axis=1) - errors > -MARGIN]
    assert (passed.mean(axis=1) > 2 * ALPHA).all()


def test_an_end_of_an_interval_is_the_limit_that_the_items_just_reject():
    values = answers(1, 700, 0.06, 0.04)[0]
    low, high = sequential.answers_interval(values)
    assert -1 < low < values.mean() < high < 1
    assert sequential.answers_p_value(values, low)[0] == pytest.approx(ALPHA, rel=1e-3)
    assert sequential.answers_p_value(-values, -high)[0] == pytest.approx(ALPHA, rel=1e-3)


@pytest.mark.parametrize(("first_look", "items"), [(300, 300), (40, 300), (60, 61)])
def test_an_end_of_a_mean_s_interval_is_the_limit_that_its_values_just_reject(first_look, items):
    values, weights = np.random.default_rng(3).normal(0.1, 1.0, items), np.linspace(1, 3, items)
    low, high = sequential.mean_interval(values, weights, first_look)
    assert low < np.average(values, weights=weights) < high
    assert sequential.mean_p_value(values, weights, first_look, low) == pytest.approx(ALPHA, rel=1e-6)
    assert sequential.mean_p_value(-values, weights, first_look, -high) == pytest.approx(ALPHA, rel=1e-6)


def test_a_later_look_narrows_the_interval_of_a_mean_and_takes_nothing_back():
    values = np.random.default_rng(4).normal(0.0, 1.0, 1_000)
    ends = [sequential.mean_interval(values[:count], np.ones(count), 40) for count in (40, 200, 1_000)]
    lows, highs = zip(*ends, strict=True)
    assert list(lows) == sorted(lows)
    assert list(highs) == sorted(highs, reverse=True)
    assert lows[0] < lows[2]


def test_what_earlier_items_showed_is_not_lost_by_later_ones():
    values = np.concatenate([np.zeros(120), -np.ones(3), np.zeros(7)])
    shown = sequential.answers_p_value(values[:120], -MARGIN)[0]
    assert sequential.answers_p_value(values, -MARGIN)[0] == shown <= ALPHA


def test_a_handful_of_equal_answers_shows_nothing():
    assert sequential.answers_p_value(np.zeros(40), -MARGIN)[0] > ALPHA


def test_where_every_item_is_lost_the_interval_begins_at_its_end():
    low, high = sequential.answers_interval(-np.ones(30))
    assert low == -1 < high < 0


def test_only_the_ratios_of_weights_count():
    values, weights = np.random.default_rng(5).normal(0.0, 1.0, 200), np.linspace(1, 3, 200)
    assert sequential.mean_interval(values, 2 * weights, 50) == pytest.approx(
        sequential.mean_interval(values, weights, 50)
    )


@pytest.mark.parametrize(("margin", "discordance"), [(0.05, 0.06), (0.1, 0.02), (0.5, 0.9)])
def test_an_equally_good_variant_passes_with_the_planned_number_of_items(margin, discordance):
    count = sequential.items_to_decide(margin, discordance)
    values = answers(2_000, count, discordance / 2, discordance / 2, seed=23)
    power = (sequential.answers_p_value(values, -margin) <= ALPHA).mean()
    # Planned with looks 1 % of the items apart, counted here at each item.
    assert sequential.POWER - 0.015 < power < sequential.POWER + 0.03


def test_fewer_differences_and_wider_margins_take_fewer_items():
    assert sequential.items_to_decide(0.04, 0.05) < sequential.items_to_decide(0.04, 0.1)
    assert sequential.items_to_decide(0.04, 0.1) < sequential.items_to_decide(0.02, 0.1)
    # (2.05375 + 1.70604)² is 14.14.
    assert sequential.items_to_decide_mean(margin=0.5, deviation=1.0) == 57
    assert sequential.items_to_decide_mean(margin=10.0, deviation=0.1) == 2


def test_the_plan_takes_no_more_items_than_one_fixed_look_would():
    # 608 right-or-wrong items at this margin and disagreement for the exact interval of one look, with equal power.
    assert sequential.items_to_decide(0.05, 0.06) <= 608


@pytest.mark.parametrize(("first_look", "items"), [(30, 45), (60, 160)])
def test_a_look_without_a_difference_does_not_exclude_the_mean_of_a_later_one(first_look, items):
    """Its own standard error is 0, and an interval of no width around it would hold for ever."""
    values = np.zeros(items)
    values[-5] = -0.35
    low, high = sequential.mean_interval(values, np.ones(items), first_look)
    assert low < values.mean() < high
    assert sequential.mean_p_value(values, np.ones(items), first_look, low) == pytest.approx(ALPHA, rel=1e-6)


def test_equal_values_alone_have_an_interval_of_no_width():
    assert sequential.mean_interval(np.zeros(160), np.ones(160), 60) == (0, 0)
