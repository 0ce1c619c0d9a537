"""Figures of fidelity: limits over whole intervals, and ratios in which the noise of a machine cancels."""

import dataclasses

import pytest

from slimqwen.evals.fidelity_figures import (
    JOINED,
    PLAIN,
    FidelityLimits,
    TextComparison,
    judge_figures,
    noise_ratios,
)
from slimqwen.records.record import Estimate
from slimqwen.stats.verdict import Verdict
from tests.evals.gate_checks import figures_of

LIMITS = FidelityLimits(**dict.fromkeys(FidelityLimits.model_fields, 0.05))


@pytest.mark.parametrize(
    ("value", "verdict"),
    [
        (0.01, Verdict.PASS),
        (0.049, Verdict.INCONCLUSIVE),
        (0.051, Verdict.INCONCLUSIVE),
        (0.06, Verdict.FAIL),
        (None, Verdict.INCONCLUSIVE),
    ],
)
def test_the_whole_interval_decides_and_a_missing_figure_is_inconclusive(value, verdict):
    estimate = None if value is None else Estimate(value=value, standard_error=0.001, count=9)
    assert set(judge_figures(figures_of(estimate), LIMITS).values()) == {verdict}


def noisy_texts(mode, factor, joined=1.0):
    """Nine texts and their joined one, whose distance from float32 is `factor` times a noise of 1e-4 nats a token."""
    texts = [
        TextComparison(
            str(number), mode, bytes=9, compared=10, kl_nats=1e-3 * factor * (1 + number % 3 / 10),
            head_deltas=[0.01 * factor, 0.02 * factor],
        )
        for number in range(9)
    ]  # fmt: skip
    return [*texts, TextComparison(JOINED, mode, bytes=90, compared=90, kl_nats=0.01 * joined)]


def test_distributions_without_likely_tokens_have_no_ratio_of_their_heads():
    flat = [
        dataclasses.replace(each, head_deltas=[])
        for each in [*noisy_texts(PLAIN, 1), *noisy_texts("batched", 1)]
    ]
    assert [row.figure for row in noise_ratios(flat, 2)] == ["kl_nats", "joined_kl_nats"]


@pytest.mark.parametrize("machine", [0.1, 1, 100])
@pytest.mark.parametrize(
    ("factor", "verdict"), [(1.1, Verdict.PASS), (1.9, Verdict.PASS), (2.5, Verdict.FAIL)]
)
def test_the_noise_of_a_machine_cancels_in_the_ratios_of_unchanged_weights(machine, factor, verdict):
    texts = [*noisy_texts(PLAIN, machine, machine), *noisy_texts("batched", machine * factor, machine)]
    kl, deltas, joined = noise_ratios(texts, 2)
    assert (kl.verdict, deltas.verdict, joined.verdict) == (verdict, verdict, Verdict.PASS)
    assert kl.value == pytest.approx(factor, rel=0.1)
    assert kl.low <= kl.value <= kl.high
    assert (kl.p_value < 0.025) == (verdict == Verdict.PASS)


def test_texts_that_disagree_about_a_ratio_leave_it_open_and_a_broken_long_text_fails_it():
    other = noisy_texts("batched", 1, joined=3)
    other[0] = dataclasses.replace(other[0], kl_nats=0.1)
    kl, _, joined = noise_ratios([*noisy_texts(PLAIN, 1), *other], 2)
    assert (kl.verdict, joined.verdict) == (Verdict.INCONCLUSIVE, Verdict.FAIL)


def test_engines_that_are_exact_to_float32_differ_by_nothing():
    ratios = noise_ratios([*noisy_texts(PLAIN, 1e-9, 1e-9), *noisy_texts("batched", 1e-7, 1e-7)], 2)
    assert {row.verdict for row in ratios} == {Verdict.PASS}
