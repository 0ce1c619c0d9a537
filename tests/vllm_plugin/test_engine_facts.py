"""What a started engine states, compared with its plan."""

import asyncio
import contextlib
import json
import logging
import math
from types import SimpleNamespace

import httpx
import pytest

from slimqwen import variant
from slimqwen.plan import start
from slimqwen.vllm_plugin import engine_facts
from slimqwen.vllm_plugin.engine_facts import AttentionLayers, PlanExpectation
from tests.gpu import plans
from tests.gpu.steps import Here

PLAN = "vLLM 0.32.0 on a10g"
FACTS = {"block_size": 544, "graph_mode": "FULL_AND_PIECEWISE", "kv_tokens": 1000}


def test_a_fact_that_differs_is_one_line_with_both_values():
    expected = PlanExpectation(plan=PLAN, facts=FACTS)
    assert engine_facts.list_differences(expected, FACTS | {"quantization": None}) == []
    assert engine_facts.list_differences(expected, {"block_size": 1088, "kv_tokens": 1000}) == [
        "block_size: planned 544, actual 1088",
        "graph_mode: planned FULL_AND_PIECEWISE, actual not stated",
    ]


@pytest.mark.parametrize(("tokens", "agrees"), [(900, True), (1100, True), (899, False), (1101, False)])
def test_a_number_that_a_plan_assumes_may_differ_by_its_tolerance(tokens, agrees):
    expected = PlanExpectation(plan=PLAN, facts=FACTS, tolerances={"kv_tokens": 0.1})
    assert (engine_facts.list_differences(expected, FACTS | {"kv_tokens": tokens}) == []) is agrees


class Attention:
    """As vLLM's layers state their backend."""

    def __init__(self, kv_cache_dtype):
        self.kv_cache_dtype = kv_cache_dtype

    def get_attn_backend(self):
        return SimpleNamespace(get_name=lambda: "FLASHINFER")


class GatedDeltaNetAttention:
    gdn_prefill_backend = "triton"

    def get_attn_backend(self):
        return SimpleNamespace(get_name=lambda: "GDN_ATTN")


def test_layers_of_one_kind_and_backend_are_one_fact():
    layers = {
        "model.layers.0.linear_attn": GatedDeltaNetAttention(),
        "model.layers.0.mlp": object(),
        "model.layers.1.linear_attn": GatedDeltaNetAttention(),
        "model.layers.2.self_attn.attn": Attention("fp8"),
        "mtp.layers.0.self_attn.attn": Attention("fp8"),
    }
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    kinds = engine_facts.attention_layers(config)
    assert (
        AttentionLayers(
            layer="GatedDeltaNetAttention",
            backend="GDN_ATTN",
            kv_cache_dtype="",
            prefill="triton",
            drafts=False,
            count=2,
        )
        in kinds
    )
    assert engine_facts.backend_facts(kinds) == {
        "GatedDeltaNetAttention": "GDN_ATTN, prefill triton, 2 layers",
        "Attention": "FLASHINFER, KV fp8, 1 layers",
        "draft Attention": "FLASHINFER, KV fp8, 1 layers",
    }


@pytest.mark.parametrize(
    ("block_size", "required", "holds", "said"),
    [
        (544, True, True, "As planned (vLLM 0.32.0 on a10g): all of 3 facts"),
        (1088, False, True, "Not as planned (vLLM 0.32.0 on a10g): block_size: planned 544, actual 1088"),
        (1088, True, False, "block_size: planned 544, actual 1088; make a new plan"),
        (None, True, False, "nothing could be compared"),
    ],
)
def test_a_start_that_differs_is_printed_and_fails_only_where_the_plan_is_required(
    monkeypatch, caplog, tmp_path, block_size, required, holds, said
):
    async def collect(app):
        if block_size is None:
            raise RuntimeError("the engine is gone")
        return FACTS | {"block_size": block_size}

    kept = tmp_path / "starts" / "v.json"
    expected = PlanExpectation(plan=PLAN, facts=FACTS, required=required, result_file=str(kept))
    monkeypatch.setenv(engine_facts.VARIABLE, expected.model_dump_json())
    monkeypatch.setattr(engine_facts, "collect_facts", collect)
    with caplog.at_level(logging.INFO, "slimqwen"):
        assert asyncio.run(engine_facts.compare_with_plan(SimpleNamespace())) is holds
    assert said in caplog.text
    different = [] if block_size == 544 else ["block_size"]
    assert kept.is_file() is (block_size is not None)
    if block_size:
        assert json.loads(kept.read_bytes()) == {"plan": PLAN, "facts": 3, "differences": different}


def test_without_a_plan_nothing_is_asked_of_the_engine(monkeypatch):
    monkeypatch.delenv(engine_facts.VARIABLE, raising=False)
    assert asyncio.run(engine_facts.compare_with_plan(SimpleNamespace()))


@pytest.mark.engine
def test_a_start_of_a_cpu_server_with_drafts_agrees_with_its_plan_in_every_fact(tmp_path, monkeypatch):
    """The rehearsal of step a of `make gpu-check`, with a look at the server."""
    seen, start_server = [], plans.started_as_planned

    @contextlib.contextmanager
    def start_and_look(command, plan, **options):
        with start_server(command, plan, **options) as server:
            text = httpx.get(f"{server.base_url}/metrics", trust_env=False).text
            seen.append((start.expect_facts(plan, required=False).facts, text))
            yield server

    monkeypatch.setattr(plans, "started_as_planned", start_and_look)
    line = plans.run(Here(variant.repository_root(), None, tmp_path / "a.json", math.inf))
    [(facts, labels)] = seen
    assert line == f"as planned: tiny-mtp4 ({len(facts)} facts)"
    assert {"block_size", "kv_blocks", "kv_tokens", "graph_mode", "dtype", "max_num_seqs"} < set(facts)
    assert sum("layers" in str(value) for value in facts.values()) >= 3  # two kinds, and the drafts'
    # What the comparison reads is what /metrics states.
    assert f'num_gpu_blocks="{facts["kv_blocks"]}"' in labels
    assert f'block_size="{facts["block_size"]}"' in labels
