"""The requests that every combination of engine modes answers."""

import pytest

from slimqwen.evals import EvalError
from slimqwen.evals.engine import scenarios
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
