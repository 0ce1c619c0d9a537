"""The front: that no candidate beats those on it, what a limit leaves, and what earlier candidates teach it."""

from dataclasses import replace
from itertools import product

import pytest

from slimqwen import variant
from slimqwen.fit.memory import ServerSettings
from slimqwen.fit.subject import find_subject
from slimqwen.plan import shapes
from slimqwen.plan.devices import read_gpu
from slimqwen.search.candidate import Candidate
from slimqwen.search.front import Front, Limits
from slimqwen.search.sensitivities import Change, Sensitivities

BASE = variant.load("tiny")
BASE_RATES = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4]
KL = {
    Change("mlp", "W8A16"): 0.0001,
    Change("mlp", "W4A16", 32): 0.0016,
    Change("mlp", "W4A16", 64): 0.0019,
    Change("attention", "W4A16", 32): 0.0004,
    Change("linear_attention", "W4A16", 32): 0.0012,
    Change("head_bits", 4, 32): 0.0020,
}
RATES = {
    Change("mtp", "W4A16", 32): [0.99 * rate for rate in BASE_RATES],
    Change("draft_vocabulary", 0.25): [0.97 * rate for rate in BASE_RATES],
    Change("draft_bits", 8): BASE_RATES,
}


@pytest.fixture
def front() -> Front:
    server = ServerSettings.of(find_subject("tiny", BASE.root), None, None)
    costs = Sensitivities(KL, RATES, BASE_RATES)
    limits = Limits(kl_nats=0.003, least_share=0.97, depth=4)
    return Front(shapes.variant_shape(BASE), server, read_gpu("a10g", BASE.root), costs, limits)


def test_the_first_is_the_fastest_of_all_combinations_within_the_limits(front: Front) -> None:
    best = 0.0
    kinds = [("none", "W8A16", "W4A16"), ("none", "W4A16"), ("none", "W4A16"), (16, 4)]
    for choices in product(*kinds, ("none", "W4A16"), (1.0, 0.25), (16, 8), range(1, 7)):
        *weights, mtp, drafted, draft_bits, depth = choices
        named = dict(zip(("mlp", "attention", "linear_attention", "head_bits"), weights, strict=True))
        kl = sum(
            KL[change] for change in KL if named[change.choice] == change.value and change.group_size != 64
        )
        if kl > 0.003 or (named["head_bits"] == 4 and draft_bits == 8):
            continue
        factor = (0.99 if mtp != "none" else 1) * (0.97 if drafted < 1 else 1)
        rates = [factor * rate for rate in BASE_RATES]
        if (1 + sum(rates[:4])) / (1 + sum(BASE_RATES[:4])) < 0.97:
            continue
        candidate = Candidate.of(
            {**named, "mtp": mtp, "draft_vocabulary": drafted, "draft_bits": draft_bits, "depth": depth}
        )
        model = front.model(candidate.shape(front.shape))
        best = max(best, front.bound(model, depth, 1 + sum(rates[:depth])))
    [first] = front.choose(1)
    assert first.tokens_per_second == pytest.approx(best)


def test_each_next_candidate_uses_less_of_the_limits(front: Front) -> None:
    chosen = front.choose(4)
    assert len({each.candidate for each in chosen}) == 4
    for number, each in enumerate(chosen):
        share = 1 - number / 5
        assert each.kl_nats <= share * 0.003
        assert 1 - each.acceptance_share <= share * 0.03
    assert chosen[0].tokens_per_second > chosen[-1].tokens_per_second
    assert {each.candidate.rounding for each in chosen if each.candidate.calibrated} == {"gptq"}


def test_a_calibration_that_loses_less_than_forecast_allows_narrower_weights(front: Front) -> None:
    [first], [later] = front.choose(1), front.choose(1, kl_factor=0.5)
    assert first.kl_nats <= 0.003 < later.kl_nats <= 0.006
    assert later.tokens_per_second > first.tokens_per_second
    [other] = front.choose(1, kl_factor=0.5, known=[later.candidate])
    assert other.candidate != later.candidate


def test_groups_of_one_candidate_have_one_size(front: Front) -> None:
    assert {each.candidate.group_size for each in front._by_speed} == {32, 64}
    assert all(
        each.candidate.attention == "none" for each in front._by_speed if each.candidate.group_size == 64
    )


def test_what_does_not_fit_the_gpu_is_left_out(front: Front) -> None:
    assert replace(front, gpu=front.gpu.with_memory(1.6)).choose(3) == []


def test_a_base_without_drafts_has_candidates_without_them(front: Front) -> None:
    alone = replace(front, sensitivities=Sensitivities(KL, {}, []))
    assert {each.candidate.depth for each in alone.choose(3)} == {0}
