"""Speculation with the MTP head changes no greedy token.

With speculation the checkpoint says M-RoPE in its config.json, as real ones do; without, it does not. Depths 2 and 3
are those of the engine check's tests (tests/evals).
"""

from dataclasses import dataclass

import pytest

from slimqwen.evals.engine import compare_tokens
from slimqwen.evals.engine_process import Request, Response, generate_responses
from slimqwen.serving.in_process import counter, engine
from tests.noise import near_tie_nats

DEPTHS = (1, 4)
pytestmark = pytest.mark.engine


@dataclass(frozen=True)
class Run:
    """What one engine answered."""

    greedy: list[Response]
    tie_nats: float | None  # of the engine without speculation
    drafted: int
    accepted: int


def answer_greedily(checkpoint, texts, depth):
    with engine(checkpoint, num_speculative_tokens=depth) as llm:
        requests = [Request(ids[:24], 48) for ids in texts]
        greedy = generate_responses(llm, requests, log_probabilities=not depth)
        drafted = counter(llm, "vllm:spec_decode_num_draft_tokens")
        accepted = counter(llm, "vllm:spec_decode_num_accepted_tokens")
        tie_nats = None if depth else near_tie_nats(llm, requests, greedy)
    return Run(greedy, tie_nats, drafted, accepted)


@pytest.fixture(scope="module")
def plain(tiny, texts):
    return answer_greedily(tiny, texts, 0)


@pytest.mark.parametrize("depth", DEPTHS)
def test_greedy_tokens_are_those_without_speculation(tiny_with_mrope, texts, plain, depth):
    run = answer_greedily(tiny_with_mrope, texts, depth)
    for expected, speculated in zip(plain.greedy, run.greedy, strict=True):
        comparison = compare_tokens(expected, speculated.tokens, plain.tie_nats)
        assert comparison.near_tie or not comparison.differs, comparison
    # Else this would say nothing about one of the two paths.
    assert 0.05 * run.drafted < run.accepted < 0.95 * run.drafted
