from types import SimpleNamespace

import numpy as np
import pytest
import torch

from slimqwen.vllm_plugin.patches.cpu import prompt_logits

TOKENS, WIDTH, IDS = 600, 16, 40


@pytest.fixture
def runner(stock_vllm):
    """What the function of vLLM's model runner reads, with a prompt of which 100 tokens were read before."""
    from vllm.v1.sample.sampler import Sampler

    torch.manual_seed(0)
    head = torch.randn(IDS, WIDTH)
    asked = []

    def compute_logits(states):
        asked.append(len(states))
        return states @ head.T

    request = SimpleNamespace(
        prompt_token_ids=[number % IDS for number in range(TOKENS)],
        in_progress_prompt_logprobs_cpu=None,
        num_computed_tokens=100,
    )
    return SimpleNamespace(
        asked=asked,
        num_prompt_logprobs={"one": 3},
        model_config=SimpleNamespace(logprobs_mode="raw_logprobs"),
        requests={"one": request},
        device="cpu",
        input_batch=SimpleNamespace(req_id_to_index={"one": 0}),
        query_start_loc=SimpleNamespace(np=np.array([0])),
        model=SimpleNamespace(compute_logits=compute_logits),
        sampler=Sampler(),
        _sync_device=lambda: None,
    )


def ask(runner):
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    torch.manual_seed(1)
    states = torch.randn(TOKENS - 100, WIDTH)
    runner.num_prompt_logprobs = {"one": 3}
    runner.requests["one"].in_progress_prompt_logprobs_cpu = None
    runner.asked.clear()
    answer = GPUModelRunner._get_prompt_logprobs_dict(runner, states, {"one": TOKENS - 100})["one"]
    return [part[100:] for part in answer[:3]]


def test_some_tokens_at_a_time_have_the_log_probabilities_of_all_at_once(runner):
    stock = ask(runner)
    assert runner.asked == [TOKENS - 101]  # what the fix is for: once this fails, vLLM divides them
    assert prompt_logits.install()
    divided, model, sampler = ask(runner), runner.model, runner.sampler
    assert runner.asked == [256, TOKENS - 101 - 256]
    assert [part.dtype for part in divided] == [part.dtype for part in stock]
    assert torch.equal(divided[0], stock[0])
    torch.testing.assert_close(divided[1], stock[1])
    assert torch.equal(divided[2], stock[2])
    assert (runner.model, runner.sampler) == (model, sampler)


def test_what_is_no_log_probability_is_left_to_vllm(runner):
    assert prompt_logits.install()
    runner.model_config.logprobs_mode = "raw_logits"
    ask(runner)
    assert runner.asked == [TOKENS - 101]


def test_a_failure_leaves_the_runner_as_it_was(runner):
    assert prompt_logits.install()
    model, sampler = runner.model, runner.sampler
    sampler.gather_logprobs = None
    with pytest.raises(TypeError):
        ask(runner)
    assert (runner.model, runner.sampler) == (model, sampler)
