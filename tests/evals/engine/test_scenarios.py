"""The requests that every combination of engine modes answers."""

from types import SimpleNamespace

import pytest

from slimqwen.evals import EvalError
from slimqwen.evals.engine import scenarios
from slimqwen.evals.engine.scenarios import Answer, Request, TieNoise
from slimqwen.progress import silent
from tests.evals.engine.examples import CONTEXT_LEN, ROOT, TINY, settings


def requests(**changes):
    sizes = {
        "context_len": CONTEXT_LEN, "max_batched_tokens": 256, "block_size": 128, "draft_tokens": 3, "concurrency": 4,
    }  # fmt: skip
    return scenarios.cut_requests(settings(), TINY, ROOT, **sizes | changes)


def test_requests_have_the_settings_lengths_and_one_is_longer_than_the_token_budget():
    cut = requests(max_batched_tokens=100)
    assert [len(each.prompt) for each in cut["prompts"]] == [12, 40, 24, 30, 356]
    assert len({each.prompt[:300] for each in cut["prefixes"]}) == 1
    assert len({each.prompt for each in cut["prefixes"]}) == 2
    assert len(cut["growing"]) == 6
    assert all(len(each.prompt) < 128 < len(each.prompt) + each.output_tokens for each in cut["growing"])
    assert len(cut["mixed"]) == 6
    assert requests(max_batched_tokens=100) == cut
    assert len(requests(max_batched_tokens=500)["prompts"]) == 4


def test_prompts_that_do_not_fit_the_context_are_an_error():
    with pytest.raises(EvalError, match="do not fit into a context of 64"):
        requests(context_len=64)


class Rereading:
    """An engine whose log-probabilities of a prompt are those of the answers, moved."""

    def __init__(self, log_probabilities, moved):
        self.positions = [
            {token: value + moved.get(token, 0) for token, value in row.items()}
            for row in log_probabilities[:-1]  # the last token is not read again
        ]

    def generate(self, prompts, sampling, use_tqdm):
        (prompt,) = prompts
        read = [
            {token: SimpleNamespace(logprob=value) for token, value in row.items()} for row in self.positions
        ]
        before = len(prompt["prompt_token_ids"]) - len(read)
        return [SimpleNamespace(prompt_logprobs=[None] * before + read)]


def test_the_noise_of_a_tie_is_the_largest_shift_of_two_likely_tokens_on_a_second_reading():
    log_ps = (
        {1: -0.5, 2: -1.0, 3: -9.0},
        {4: -0.1, 5: -8.0},
        {6: -0.1},
    )  # at the second position nothing ties
    request, response = Request((7, 8, 9), 3), Answer((1, 4, 6), log_ps, 0)

    def noise(moved):
        return scenarios.measure_tie_noise(
            Rereading(log_ps, moved), {"a": [request]}, {"a": [response]}, silent
        )

    assert noise({2: 0.2, 5: 3.0}) == TieNoise(pytest.approx(0.2), 1)
    assert noise({1: 0.1, 2: 0.1}) == TieNoise(pytest.approx(0.0), 1)
    assert noise({2: 0.2}).near_tie_nats(3) == pytest.approx(0.6)


def test_without_two_likely_tokens_there_is_no_noise_to_measure():
    response = Answer((4, 6), ({4: -0.1, 5: -8.0}, {6: -0.1}), 0)
    llm = Rereading(response.log_probabilities, {})
    with pytest.raises(EvalError, match="nowhere close in 1 answers"):
        scenarios.measure_tie_noise(llm, {"a": [Request((7,), 1)]}, {"a": [response]}, silent)
