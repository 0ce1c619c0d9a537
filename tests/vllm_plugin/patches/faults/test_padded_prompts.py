from types import SimpleNamespace

import pytest

from slimqwen.serving import in_process
from slimqwen.vllm_plugin.patches.faults import padded_prompts

DRAFTS = 3
OUTPUT_TOKENS = 8


@pytest.mark.usefixtures("stock_vllm")
def test_only_requests_without_computed_tokens_lose_their_placeholders(monkeypatch):
    from vllm.v1.core.sched.scheduler import Scheduler

    seen = []
    monkeypatch.setattr(
        Scheduler, "_update_after_schedule", lambda self, scheduler_output: seen.append(scheduler_output)
    )
    assert padded_prompts.install()
    assert not padded_prompts.install()
    scheduler = SimpleNamespace(
        requests={
            name: SimpleNamespace(num_computed_tokens=computed)
            for name, computed in {"running": 6, "cached": 1, "new": 0, "long": 0}.items()
        }
    )
    output = SimpleNamespace(
        scheduled_spec_decode_tokens={"running": [4, 5, 6], "cached": [-1, -1, -1], "new": [-1, -1, -1]},
        num_scheduled_tokens={"running": 4, "cached": 4, "new": 4, "long": 9},
        total_num_scheduled_tokens=21,
    )
    Scheduler._update_after_schedule(scheduler, output)
    assert seen == [output]
    assert output.scheduled_spec_decode_tokens == {"running": [4, 5, 6], "cached": [-1, -1, -1]}
    assert output.num_scheduled_tokens == {"running": 4, "cached": 4, "new": 1, "long": 9}
    assert output.total_num_scheduled_tokens == 18


@pytest.fixture(scope="module")
def settings(tiny):
    """vLLM's configuration of an engine with drafts, and the layout of keys and values beside states."""
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        MambaSpec,
    )

    drafts = {"method": "mtp", "num_speculative_tokens": DRAFTS}
    config = EngineArgs(str(tiny), dtype="bfloat16", speculative_config=drafts).create_engine_config()
    config.cache_config.num_gpu_blocks = 64
    keys = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    states = MambaSpec(256, shapes=((8,),), dtypes=(torch.float32,), num_speculative_blocks=DRAFTS)
    groups = [KVCacheGroupSpec(["attention"], keys), KVCacheGroupSpec(["linear"], states)]
    return config, KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=groups)


def schedule_beside(settings, prompt):
    """Two steps of the scheduler of a GPU: a prompt joins a running request, then both are decoded."""
    from vllm import SamplingParams
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.request import Request

    scheduler = AsyncScheduler(*settings, None, block_size=256, hash_block_size=16)
    scheduler.use_v2_model_runner = True
    scheduler.add_request(Request("running", [1, 2, 3, 4], SamplingParams(max_tokens=99), None))
    scheduler.schedule()
    scheduler.add_request(Request("joining", prompt, SamplingParams(max_tokens=99), None))
    steps = [scheduler.schedule() for _ in range(2)]
    assert [step.total_num_scheduled_tokens for step in steps] == [
        sum(step.num_scheduled_tokens.values()) for step in steps
    ]
    assert [step.num_scheduled_tokens["running"] for step in steps] == [1 + DRAFTS] * 2
    return [
        (step.num_scheduled_tokens["joining"], "joining" in step.scheduled_spec_decode_tokens)
        for step in steps
    ]


@pytest.mark.usefixtures("stock_vllm")
def test_the_schedule_of_the_v2_runner_begins_a_prompt_of_one_token_without_drafts(settings):
    """Where the first line fails, vLLM has been mended: the fix can go then."""
    assert schedule_beside(settings, [7]) == [(1 + DRAFTS, True), (1 + DRAFTS, True)]
    assert padded_prompts.install()
    assert schedule_beside(settings, [7]) == [(1, False), (1 + DRAFTS, True)]
    assert schedule_beside(settings, [7, 8]) == [(2, False), (1 + DRAFTS, True)]


def fill_states(llm):
    """Leave in every slot what is no empty state, as earlier requests would."""
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    for caches in runner.kv_caches:
        for cache in caches if isinstance(caches, list | tuple) else [caches]:
            cache.fill_(1)


def respond_beside(llm, running, joining):
    """The tokens of a prompt that comes while another is generated; without another, alone."""
    from vllm import SamplingParams

    engine, found = llm.llm_engine, {}
    settings = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False)
    fill_states(llm)
    if running:
        engine.add_request("running", {"prompt_token_ids": running}, settings)
        engine.step()
    engine.add_request("joining", {"prompt_token_ids": joining}, settings)
    while engine.has_unfinished_requests():
        found |= {each.request_id: list(each.outputs[0].token_ids) for each in engine.step()}
    return found["joining"]


@pytest.mark.engine
def test_a_prompt_of_one_token_responds_beside_a_running_request_as_alone(tiny, texts, monkeypatch):
    with in_process.engine(tiny, num_speculative_tokens=DRAFTS, max_num_seqs=2) as llm:
        from vllm.v1.core.sched.scheduler import Scheduler

        for length in (1, 2):
            alone, beside = (respond_beside(llm, running, texts[0][:length]) for running in ([], texts[1]))
            assert beside == alone, length
        stock = Scheduler._update_after_schedule.__wrapped__
        monkeypatch.setattr(Scheduler, "_update_after_schedule", stock)
        # Equal where vLLM has been mended: the fix can go then.
        assert respond_beside(llm, texts[1], texts[0][:1]) != respond_beside(llm, [], texts[0][:1])
