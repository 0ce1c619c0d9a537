import numpy as np
import pytest

from slimqwen.stats import non_inferiority, sequential
from slimqwen.stats.estimates import Estimate
from slimqwen.stats.verdict import Verdict


def judged(gains, *, simply=True, margin=0.04):
    weights = None if simply else np.ones(len(gains))
    return non_inferiority.judge_loss(gains, weights, first_look=len(gains), margin=margin)


def test_the_whole_interval_has_to_lie_on_one_side_of_the_margin():
    lost = np.where(np.arange(300) % 4 == 0, -1.0, 0.0)
    assert judged(np.zeros(300)).verdict is Verdict.PASS
    assert judged(np.zeros(60)).verdict is Verdict.INCONCLUSIVE
    assert judged(lost).verdict is Verdict.FAIL
    assert judged(lost, margin=0.5).verdict is Verdict.PASS


def test_the_p_value_is_at_most_alpha_exactly_where_the_verdict_is_pass():
    rng = np.random.default_rng(2)
    verdicts = set()
    for count in range(20, 500, 20):
        answers, means = rng.choice([-1, 0, 1], count, p=[0.02, 0.96, 0.02]), rng.normal(0, 0.1, count)
        for judgement in (judged(answers), judged(means, simply=False)):
            verdicts.add(judgement.verdict)
            assert (judgement.p_value <= sequential.ALPHA) == (judgement.verdict is Verdict.PASS)
    assert verdicts >= {Verdict.PASS, Verdict.INCONCLUSIVE}


@pytest.mark.parametrize(
    ("estimate", "right", "said"),
    [
        # Clopper and Pearson of 70 of 100: 0.600 to 0.788.
        (Estimate(0.7, 0.0, 100), 70, {0.59: "pass", 0.61: "inconclusive", 0.79: "fail"}),
        # All of five right tells little: 0.478 to 1.
        (Estimate(1.0, 0.0, 5), 5, {0.47: "pass", 0.49: "inconclusive"}),
        # Student's with 9 degrees of freedom: 2.262 standard errors to each side.
        (Estimate(0.5, 0.1, 10), None, {0.27: "pass", 0.28: "inconclusive", 0.73: "fail"}),
        # At the floor is not above it.
        (Estimate(0.5, 0.0, 10), None, {0.49: "pass", 0.5: "inconclusive", 0.51: "fail"}),
    ],
)
def test_a_score_is_above_its_floor_only_with_its_whole_interval(estimate, right, said):
    for floor, verdict_said in said.items():
        assert non_inferiority.judge_floor(estimate, floor, right=right) == verdict_said
