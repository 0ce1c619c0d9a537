"""The contest of arms: speed-ups by round, who goes on, and the verdict."""

import math
from collections.abc import Mapping, Sequence

import pytest

from slimqwen.search.tune.arms import UNDRAFTED, Arm
from slimqwen.search.tune.contest import FEWEST_ROUNDS, Contest, Turn
from slimqwen.stats.verdict import Verdict
from tests.search.tune.turns import ARMS, K2, K4, NGRAM, turn


def contest(*rounds: Mapping[str, Mapping[int, float]], arms: Sequence[Arm] = (UNDRAFTED, K2, K4)) -> Contest:
    """A contest after rounds, each with the tokens a second of its arms by load."""
    made = Contest(arms, {})
    for number, speeds in enumerate(rounds):
        for name, by_load in speeds.items():
            made.add_turn(turn(ARMS[name], number, by_load, drafts=0 if name == "none" else 100))
    return made


def test_a_speed_up_is_paired_by_round() -> None:
    made = contest(
        {"none": {1: 100, 4: 200}, "k2": {1: 110, 4: 300}},
        {"none": {1: 50, 4: 100}, "k2": {1: 60, 4: 150}},
        {"none": {1: 100, 4: 200}},  # K2's turn did not come
    )
    figures = made.describe(K2)
    assert (figures.rounds, figures.kv_tokens, figures.near_ties, figures.ended) == (2, 512, 1, "")
    one, four = figures.loads["1"], figures.loads["4"]
    assert one.speedup is not None
    assert one.speedup.value == pytest.approx(math.sqrt(1.1 * 1.2))
    assert one.speedup.low < 1.1 < 1.2 < one.speedup.high
    assert four.speedup is not None
    assert (four.speedup.low, four.speedup.value, four.speedup.high) == pytest.approx((1.5, 1.5, 1.5))
    assert figures.speedup is not None
    assert figures.speedup.value == pytest.approx(figures.speed)
    assert figures.speed == pytest.approx(math.sqrt(math.sqrt(1.1 * 1.2) * 1.5))
    assert one.tokens_per_second == pytest.approx(2000 / (1000 / 110 + 1000 / 60))
    assert one.acceptance_length == 4
    assert one.ttft_ms == pytest.approx((11.818 + 16.667) / 2, rel=0.01)
    undrafted = made.describe(UNDRAFTED)
    assert (undrafted.rounds, undrafted.speed, undrafted.speedup) == (3, 1, None)
    assert (undrafted.loads["1"].speedup, undrafted.loads["1"].acceptance_length) == (None, None)


def test_with_a_single_round_the_interval_is_over_requests_and_there_is_none_over_all_loads() -> None:
    made = contest({"none": {1: 100}, "k2": {1: 125}})
    figures = made.describe(K2)
    ratio = figures.loads["1"].speedup
    assert ratio is not None
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((1.25, 1.25, 1.25))
    assert figures.speedup is None
    assert made.verdict == Verdict.INCONCLUSIVE


def test_an_arm_that_is_slower_at_every_load_ends_and_the_fastest_with_drafts_stays() -> None:
    rounds = [{"none": {1: 100, 4: 100}, "k2": {1: 90, 4: 80}, "k4": {1: 70, 4: 60}}] * 2
    made = contest(*rounds)
    made.end_slow_arms()
    assert made.ended == {K4.name: "surely slower than the best"}
    assert [arm.name for arm in made.alive] == ["none", "MTP K=2"]
    assert made.find_fastest() is K2


def test_an_arm_that_is_the_fastest_at_one_load_goes_on() -> None:
    made = contest(*[{"none": {1: 100, 4: 100}, "k2": {1: 150, 4: 150}, "k4": {1: 160, 4: 60}}] * 2)
    made.end_slow_arms()
    assert made.ended == {}
    # Within noise of the best at one load.
    near = contest(
        {"none": {1: 100}, "k2": {1: 150}, "k4": {1: 140}}, {"none": {1: 100}, "k2": {1: 140}, "k4": {1: 141}}
    )
    near.end_slow_arms()
    assert near.ended == {}


def test_drafts_slower_than_none_end_though_no_arm_with_drafts_is_faster() -> None:
    made = contest(
        *[{"none": {1: 100}, "k2": {1: 99}, "k4": {1: 98}, "ngram": {1: 97}}] * 2,
        arms=(UNDRAFTED, K2, K4, NGRAM),
    )
    made.end_slow_arms()
    assert set(made.ended) == {K4.name, NGRAM.name}


@pytest.mark.parametrize(
    ("speeds", "verdict"),
    [
        ([120, 121, 122], Verdict.PASS),
        ([80, 81, 82], Verdict.FAIL),
        ([80, 100, 130], Verdict.INCONCLUSIVE),
        ([120, 121], Verdict.INCONCLUSIVE),
    ],
)
def test_the_interval_of_the_fastest_beside_one_decides_after_three_rounds(
    speeds: Sequence[float], verdict: Verdict
) -> None:
    made = contest(*[{"none": {1: 100}, "k2": {1: speed}} for speed in speeds], arms=(UNDRAFTED, K2))
    assert FEWEST_ROUNDS == 3
    assert made.verdict == verdict
    assert made.is_decided == (verdict != Verdict.INCONCLUSIVE)


def test_a_contest_goes_on_while_arms_may_win() -> None:
    made = contest(*[{"none": {1: 100}, "k2": {1: 120 + n}, "k4": {1: 119 + n}} for n in range(3)])
    assert made.verdict == Verdict.PASS
    assert not made.is_decided


def test_an_arm_that_fails_is_out_with_its_reason_and_without_figures() -> None:
    made = contest({"none": {1: 100}, "k2": {1: 200}, "k4": {1: 120}})
    made.add_turn(Turn(arm=K2.name, number=1, seconds=3, failure="it died"))
    out = made.describe(K2)
    assert (out.ended, out.rounds, out.loads, out.speed) == ("it died", 0, {}, 0)
    assert made.find_fastest() is K4
    assert [arm.name for arm in made.describe_all()] == ["MTP K=4", "none", "MTP K=2"]


def test_without_an_arm_that_drafts_there_is_nothing_that_pays() -> None:
    made = Contest((UNDRAFTED, K2), {K2.name: "refused"})
    made.add_turn(turn(UNDRAFTED, 0, {1: 100}))
    assert (made.find_fastest(), made.verdict, made.is_decided) == (None, Verdict.FAIL, True)
    waiting = Contest((UNDRAFTED, K2), {})
    waiting.add_turn(turn(UNDRAFTED, 0, {1: 100}))
    assert waiting.verdict == Verdict.INCONCLUSIVE
    assert waiting.describe(K2).ended == "it had no turn in the given time"
