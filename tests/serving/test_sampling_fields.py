"""Every sampling field of the API beside prompts of the lengths at which steps and contexts end: a request ends alone.

One server without drafts and one with four.
"""

import dataclasses
import itertools
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType, SimpleNamespace

import httpx
import pytest

from slimqwen import variant
from slimqwen.serving.command import ServerCommand
from slimqwen.serving.server import free_port, run_server
from slimqwen.variant import DRAFTS_REFUSE
from slimqwen.vllm_plugin.api_key import authorization

pytestmark = pytest.mark.engine

BUDGET, CONTEXT, OUTPUT_TOKENS = 64, 128, 8
LENGTHS = (1, BUDGET - 1, BUDGET, BUDGET + 1, *range(CONTEXT - 6, CONTEXT + 1))
AT_ONCE = 8
SETTINGS = {
    "VLLM_MAX_MODEL_LEN": CONTEXT,
    "VLLM_MAX_NUM_BATCHED_TOKENS": BUDGET,
    "VLLM_MAX_NUM_SEQS": AT_ONCE,
    "VLLM_REASONING_PARSER": "qwen3",  # without which thinking_token_budget is refused
}

FIELDS = {
    "allowed_token_ids": [300, 301, 302],
    "bad_words": ["the"],
    "echo": True,
    "frequency_penalty": 1.0,
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "length_penalty": 2.0,
    "logit_bias": {"300": 5.0},
    "logprob_token_ids": [300, 301],
    "logprobs": 3,
    "max_tokens": 1,
    "min_p": 0.1,
    "min_tokens": 1,
    "n": 3,
    "presence_penalty": 1.0,
    "prompt_logprobs": 2,
    "repetition_detection": {"max_pattern_size": 4, "min_pattern_size": 1, "min_count": 2},
    "repetition_penalty": 1.3,
    "response_format": {"type": "json_object"},
    "routed_experts_prompt_start": 1,
    "seed": 7,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "stop": ["."],
    "stop_token_ids": [300],
    "stream": True,
    "stream_interval": 2,
    "structured_outputs": {"choice": ["yes", "no"]},
    "temperature": 0.0,
    "thinking_token_budget": 2,
    "top_k": 5,
    "top_p": 0.8,
    "truncate_prompt_tokens": 5,
    "use_beam_search": True,
    "watermarking": False,
}
"""A value that vLLM accepts for each field."""

REFUSED = {0: {"logprob_token_ids"}, 4: set(DRAFTS_REFUSE["cpu"])}
"""Fields that a server refuses beside every prompt, by its number of drafts."""


@pytest.fixture(scope="module", params=REFUSED, ids=lambda drafts: f"{drafts} drafts")
def served(request, tmp_path_factory):
    tried = variant.load("tiny-mtp4" if request.param else "tiny")
    given = {
        key: variant.Setting(key, str(value), tried.folder / "config.env", 0)
        for key, value in SETTINGS.items()
    }
    tried = dataclasses.replace(tried, settings=MappingProxyType({**tried.settings, **given}))
    command = ServerCommand.resolve(tried, port=free_port(), platform="cpu")
    client = httpx.Client(base_url=command.url, headers=authorization(), timeout=600, trust_env=False)
    with run_server(command, log=tmp_path_factory.mktemp("fields") / "vllm.log"), client:
        yield SimpleNamespace(drafts=request.param, client=client)


def complete(served, length, **fields):
    body = {
        "model": "default",
        "prompt": [300 + number * 7 % 900 for number in range(length)],
        "max_tokens": min(OUTPUT_TOKENS, max(1, CONTEXT - length)),
        **fields,
    }
    return served.client.post("/v1/completions", json=body)


def greedy_texts(served):
    """One after the other, so that no other request of a step decides a near tie."""
    responses = [complete(served, length, temperature=0.0, ignore_eos=True) for length in LENGTHS[:-1]]
    return [response.raise_for_status().json()["choices"][0]["text"] for response in responses]


def test_every_sampling_field_of_vllm_is_tried():
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.sampling_params import SamplingParams

    assert set(CompletionRequest.model_fields) & set(SamplingParams.__struct_fields__) <= FIELDS.keys()
    assert FIELDS.keys() <= set(CompletionRequest.model_fields)


def test_no_sampling_field_beside_a_prompt_of_any_length_harms_the_server(served):
    before = greedy_texts(served)
    asked = list(itertools.product(FIELDS, LENGTHS))

    def ask(field, length):
        response = complete(served, length, **{field: FIELDS[field]})
        is_broken = '"error"' in response.text and response.status_code == 200
        return 500 if is_broken else response.status_code

    with ThreadPoolExecutor(AT_ONCE) as clients:
        statuses = dict(zip(asked, clients.map(lambda each: ask(*each), asked), strict=True))
    assert {each: status for each, status in statuses.items() if status not in (200, 400)} == {}
    refused = {field for field in FIELDS if statuses[field, BUDGET + 1] == 400}
    assert refused == REFUSED[served.drafts]
    # A prompt that fills the context leaves no room for a token, but where it is cut.
    assert {field for field in FIELDS if statuses[field, CONTEXT] == 200} == {"truncate_prompt_tokens"}
    assert served.client.get("/health").status_code == 200
    assert greedy_texts(served) == before
