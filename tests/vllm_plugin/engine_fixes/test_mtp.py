"""Speculation with the MTP head changes no output: neither greedy tokens nor the frequencies of sampled ones.

With speculation the checkpoint says M-RoPE in its config.json, as real ones do; without, it does not.
"""

import random
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from scipy import stats

from slimqwen.evals.engine.modes import compare
from slimqwen.evals.engine.scenarios import Answer, Request, replay
from slimqwen.serving.in_process import counter, engine
from tests.noise import near_tie_nats
from tests.vllm_plugin.frequencies import DRAWN_TOKENS, DRAWS, LEVEL, Draws, draw, homogeneity

DEPTHS = (1, 2, 3, 4)
SAMPLED_DEPTH = 4
"""Depth whose frequencies are compared: drafting costs a CPU a loop in Python over the sequences of a batch, and four
drafts pass through all that one would.
"""


@dataclass(frozen=True)
class Run:
    """What one engine answered."""

    greedy: list[Answer]
    tie_nats: float | None  # of the engine without speculation
    drafted: int
    accepted: int
    draws: Draws | None
    unfixed_draws: Draws | None


def without_the_fix(stock_expand):
    """The sampler's expansion with vLLM's own function, in memory that happens to hold what does least harm.

    That is a temperature of 1, no top-k and no top-p: a milder fault than any other value.
    """

    def expand_batch_to_tokens(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
        rows = torch.full((num_tokens,), 1.0 if x.dtype == torch.float32 else 8192, dtype=x.dtype)
        stock_expand(rows, x, cu_num_tokens, replace_from, replace_to)
        return rows

    return mock.patch("vllm.v1.sample.rejection_sampler.expand_batch_to_tokens", expand_batch_to_tokens)


def measure(checkpoint, texts, beginnings, depth, stock_expand):
    with engine(checkpoint, num_speculative_tokens=depth) as llm:
        requests = [Request(ids[:24], 48) for ids in texts]
        greedy = replay(llm, requests, log_probabilities=not depth)
        drafted = counter(llm, "vllm:spec_decode_num_draft_tokens")
        accepted = counter(llm, "vllm:spec_decode_num_accepted_tokens")
        tie_nats = None if depth else near_tie_nats(llm, requests, greedy)
        draws = unfixed_draws = None
        if depth == SAMPLED_DEPTH:
            draws = draw(llm, beginnings, DRAWS, seed=10_000 * depth)
            with without_the_fix(stock_expand):
                unfixed_draws = draw(llm, beginnings, DRAWS, seed=1)
    return Run(greedy, tie_nats, drafted, accepted, draws, unfixed_draws)


@pytest.fixture(scope="module")
def run(tiny, tiny_with_mrope, texts, beginnings, stock_expand):
    """run(depth): one engine for each depth, kept for all tests."""
    done = {}

    def run_once(depth):
        if depth not in done:
            done[depth] = measure(tiny_with_mrope if depth else tiny, texts, beginnings, depth, stock_expand)
        return done[depth]

    return run_once


def simulated(seed, sharpness, count):
    """Draws of tokens from Markov chains of 30 tokens, one chain a prompt."""
    chance = random.Random(seed)
    ranks = range(1, 31)
    chains = [[[0.0] * 30 for _ in range(30)] for _ in range(5)]
    fixed = random.Random(0)
    for chain in chains:
        for row in chain:
            row[:] = [rank**-sharpness for rank in fixed.sample(ranks, 30)]
    draws = []
    for chain in chains:
        draws.append([])
        for _ in range(count):
            tokens = [0]
            for _ in range(DRAWN_TOKENS):
                tokens += chance.choices(range(30), chain[tokens[-1]])
            draws[-1].append(tuple(tokens[1:]))
    return draws


def test_homogeneity_is_uniform_when_the_draws_agree():
    p_values = [
        homogeneity(simulated(seed, 1.4, 200), simulated(1000 + seed, 1.4, 400))[0] for seed in range(60)
    ]
    assert stats.kstest(p_values, "uniform").pvalue > 1e-4
    assert min(p_values) > LEVEL


def test_homogeneity_rejects_another_temperature():
    # Powers of the rank: a temperature of 0.7 for one and 1.0, the milder fault below, for the other.
    p, _ = homogeneity(simulated(1, 1.0 / 0.7, DRAWS), simulated(2, 1.0, 2 * DRAWS))
    assert p < LEVEL


@pytest.mark.engine
@pytest.mark.parametrize("depth", DEPTHS)
def test_greedy_tokens_are_those_without_speculation(run, depth):
    for plain, speculated in zip(run(0).greedy, run(depth).greedy, strict=True):
        comparison = compare(plain, speculated.tokens, run(0).tie_nats)
        assert comparison.near_tie or not comparison.differs, comparison


@pytest.mark.engine
@pytest.mark.parametrize("depth", DEPTHS)
def test_drafts_were_both_accepted_and_rejected(run, depth):
    """Else the tests beside this one would say nothing about one of the two paths."""
    assert 0.05 * run(depth).drafted < run(depth).accepted < 0.95 * run(depth).drafted


@pytest.mark.engine
def test_sampled_tokens_are_as_frequent_as_without_speculation(run, undrafted_draws):
    p, _ = homogeneity(run(SAMPLED_DEPTH).draws, undrafted_draws)
    assert p > LEVEL


@pytest.mark.engine
def test_the_frequencies_show_when_the_fix_is_missing(run, undrafted_draws):
    """The test above has the power that it needs."""
    p, _ = homogeneity(run(SAMPLED_DEPTH).unfixed_draws, undrafted_draws)
    assert p < LEVEL
