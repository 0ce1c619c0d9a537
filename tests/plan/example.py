"""A plan as a rehearsal makes it, for tests that need no engine."""

import json

import pytest
import torch

from slimqwen.plan.facts import (
    EngineConfig,
    Graphs,
    JitModule,
    KvCache,
    Plan,
)
from slimqwen.plan.record import PlanRecord
from slimqwen.records import provenance
from slimqwen.vllm_plugin.engine_facts import AttentionLayers
from slimqwen.vllm_plugin.patches.table import KNOWN_VERSIONS

needs_cuda_build = pytest.mark.skipif(
    torch.version.cuda is None, reason="this torch is a CPU build: run in an environment of PLATFORM=cuda"
)


def plan(
    *,
    backend="FLASH_ATTN",
    kv_cache_dtype="auto",
    drafts=4,
    dtype="bfloat16",
    state_dtype="float32",
    prefix_caching=False,
    sizes=(5, 10, 15, 20, 25, 30, 35, 40),
    full=(5, 10, 15, 20, 25, 30, 35, 40),
    shortest_hit=None,
    compiler=True,
    prefill="triton",
    flashinfer_sampler=False,
    failed_at=None,
    error=None,
    gpu="a10g",
    vllm=None,
    schedule=None,
    method="mtp",
    capability="8.6",
):
    """The plan of a variant of eight sequences with MTP on an A10G."""

    def layers(kind, backend, prefill):
        return AttentionLayers(
            layer=kind, backend=backend, kv_cache_dtype="auto", prefill=prefill, drafts=False, count=8
        )

    modules = {
        "FlashInfer attention": backend == "FLASHINFER",
        "FlashInfer Gated DeltaNet prefill": prefill == "flashinfer",
        "FlashInfer sampling": flashinfer_sampler,
    }
    return Plan(
        variant="v",
        gpu=gpu,
        compute_capability=capability,
        planned="2026-01-01T00:00:00Z",
        vllm=vllm or KNOWN_VERSIONS["cpu" if gpu == "cpu" else "cuda"][-1],
        checkpoint="weights/v",
        flags={
            "cudagraph-capture-sizes": json.dumps(list(sizes)),
            "speculative-config": json.dumps(
                {"method": method, "num_speculative_tokens_per_batch_size": schedule}
            ),
        },
        engine=EngineConfig(
            architecture="Qwen3_5ForConditionalGeneration",
            dtype=dtype,
            quantization="compressed-tensors",
            model_runner="V2",
            max_model_len=13312,
            max_num_seqs=8,
            max_num_batched_tokens=2048,
            chunked_prefill=True,
            prefix_caching=prefix_caching,
            num_speculative_tokens=drafts,
            kv_cache_dtype=kv_cache_dtype,
            state_dtype=state_dtype,
            state_cache_mode="none",
            compilation="VLLM_COMPILE",
            requested_graph_mode="FULL_AND_PIECEWISE",
            requested_graph_sizes=list(sizes),
        ),
        attention=[
            layers("Attention", backend, ""),
            *([layers("GatedDeltaNet", "GDN_ATTN", prefill)] if prefill else []),
        ],
        kv_cache=KvCache(
            available_bytes=2**33,
            block_size=544,
            blocks=100,
            tokens=100_000,
            sequences_at_max_model_len=17.0,
            shortest_prompt_with_hit=shortest_hit,
        ),
        graphs=Graphs(
            mode="FULL_AND_PIECEWISE" if full else "PIECEWISE",
            captured={"FULL": list(full)} if full else {},
            decode_query_len=drafts + 1,
        ),
        jit=[
            JitModule(module=name, reason="chosen", possible=compiler)
            for name, chosen in modules.items()
            if chosen
        ],
        failed_at=failed_at,
        error=error,
    )


def record(root, *plans, ended="2026-01-01T00:00:00Z"):
    """The record of plans of a variant."""
    circumstances = provenance.circumstances(root, ["slimqwen", "plan"], "2026-01-01T00:00:00Z")
    return PlanRecord(variant="v", plans=plans, provenance=circumstances.model_copy(update={"ended": ended}))
