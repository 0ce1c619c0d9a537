"""Engine facts: the configuration of a started engine in the terms of a plan, and its differences from the plan.

Only the worker knows its backends and graphs, so `slimqwen.serving.command` passes `EngineFacts` to vLLM with
`--worker-extension-cls`. The rest is in the API server's configuration, which `/metrics` shows as cache_config_info.
A plan is made with the same functions (`slimqwen.plan.resolution`).
"""

import contextlib
import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

logger = logging.getLogger(__name__)

VARIABLE = "SLIMQWEN_PLAN"

COMPARISONS = ".cache/starts"
"""Folder of a workspace with the comparison of each variant's last start with its plan."""


class PlanExpectation(BaseModel):
    """The planned facts with which a started engine is compared.

    Attributes:
        plan: version of vLLM and device of the plan, for the log.
        facts: name -> planned value.
        tolerances: name -> largest difference, as a share of the planned number; all other facts have to be equal.
        required: whether the server ends if a fact differs.
        result_file: file that gets plan, number of facts and names of those that differ, as JSON; empty for none.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    plan: str
    facts: dict[str, Any]
    tolerances: dict[str, float] = {}
    required: bool = False
    result_file: str = ""


class AttentionLayers(BaseModel):
    """The layers of one kind that have the same backend."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    layer: str = Field(description="vLLM's class of the layers")
    backend: str
    kv_cache_dtype: str
    prefill: str = Field(description="implementation of a Gated DeltaNet prefill; empty for other layers")
    drafts: bool = Field(description="whether the layers belong to the MTP head")
    count: int


class EngineFacts:
    """Extension of vLLM's worker with one method, which the API server calls by name."""

    vllm_config: Any
    model_runner: Any

    def slimqwen_engine_facts(self) -> dict[str, Any]:
        """Attention backends and CUDA graphs of this worker: name of a fact -> value."""
        config = self.vllm_config
        return {**backend_facts(attention_layers(config)), **graph_facts(config, self.model_runner)}


async def collect_facts(app: Any) -> dict[str, Any]:
    """Collect every fact of the engine, from vLLM's application `app` after its start: name of a fact -> value."""
    config = app.state.vllm_config
    (worker, *_) = await app.state.engine_client.collective_rpc(EngineFacts.slimqwen_engine_facts.__name__)
    return {**config_facts(config), **cache_facts(config), **worker}


def list_differences(expected: PlanExpectation, actual: Mapping[str, Any]) -> list[str]:
    """A line for each fact that differs from the plan: its name, the planned value, the actual value."""
    return [
        f"{name}: planned {planned}, actual {actual.get(name, 'not stated')}"
        for name, planned in expected.facts.items()
        if not _agree(planned, actual.get(name), expected.tolerances.get(name, 0.0))
    ]


def _agree(planned: Any, actual: Any, tolerance: float) -> bool:
    if tolerance and isinstance(actual, int | float):
        return bool(abs(actual - planned) <= tolerance * planned)
    return bool(planned == actual)


def config_facts(config: Any) -> dict[str, Any]:
    """Facts from vLLM's configuration that are known before blocks are aligned and graphs are resolved."""
    cache, scheduler, compilation = config.cache_config, config.scheduler_config, config.compilation_config
    speculation = config.speculative_config
    return {
        "architecture": config.model_config.architecture,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "quantization": config.model_config.quantization,
        "model_runner": "V2" if config.use_v2_model_runner else "V1",
        "max_model_len": config.model_config.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "chunked_prefill": bool(scheduler.enable_chunked_prefill),
        "prefix_caching": bool(cache.enable_prefix_caching),
        "num_speculative_tokens": speculation.num_speculative_tokens if speculation else 0,
        "kv_cache_dtype": str(cache.cache_dtype),
        "state_dtype": str(cache.mamba_ssm_cache_dtype),
        "state_cache_mode": str(cache.mamba_cache_mode),
        "compilation": compilation.mode.name,
        "requested_graph_mode": compilation.cudagraph_mode.name,
        "requested_graph_sizes": list(compilation.cudagraph_capture_sizes or []),
    }


def cache_facts(config: Any) -> dict[str, Any]:
    """Facts of the KV cache of a started engine, as the metric `vllm:cache_config_info` shows them."""
    cache = config.cache_config
    return {
        "block_size": cache.block_size,
        "kv_blocks": cache.num_gpu_blocks,
        "kv_tokens": cache.kv_cache_size_tokens,
        "sequences_at_max_model_len": round(cache.kv_cache_max_concurrency, 2),
    }


def attention_layers(config: Any) -> list[AttentionLayers]:
    """The layers with a cache, grouped by kind and backend; `config` is vLLM's, after the models were built."""
    layers: list[AttentionLayers] = []
    for name, layer in config.compilation_config.static_forward_context.items():
        if not hasattr(layer, "get_attn_backend"):
            continue
        prefill = getattr(layer, "gdn_prefill_backend", None) or getattr(
            getattr(layer, "chunk_gated_delta_rule", None), "forward_method", None
        )
        layers.append(
            AttentionLayers(
                layer=type(layer).__name__,
                backend=layer.get_attn_backend().get_name(),
                kv_cache_dtype=str(getattr(layer, "kv_cache_dtype", "")),
                prefill=getattr(prefill, "__name__", str(prefill or "")),
                drafts=name.startswith("mtp."),
                count=1,
            )
        )
    return [layer.model_copy(update={"count": count}) for layer, count in Counter(layers).items()]


def backend_facts(kinds: Iterable[AttentionLayers]) -> dict[str, str]:
    """Attention backend of each kind of layers, in words."""
    return {
        f"{'draft ' if kind.drafts else ''}{kind.layer}": ", ".join(
            part
            for part in (
                kind.backend,
                f"prefill {kind.prefill}" if kind.prefill else "",
                f"KV {kind.kv_cache_dtype}" if kind.kv_cache_dtype else "",
                f"{kind.count} layers",
            )
            if part
        )
        for kind in kinds
    }


def graph_facts(config: Any, runner: Any) -> dict[str, Any]:
    """CUDA graphs of a started worker: the mode after vLLM's fallbacks, and for runner V2 the captured sizes."""
    facts: dict[str, Any] = {"graph_mode": config.compilation_config.cudagraph_mode.name}
    if config.use_v2_model_runner:
        facts["captured_graphs"] = captured_sizes(runner.cudagraph_manager)
    return facts


def captured_sizes(manager: Any) -> dict[str, list[int]]:
    """Numbers of tokens for which vLLM's V2 CudaGraphManager captured a graph, by mode; empty if `manager` is None."""
    kinds = manager._capture_descs if manager is not None else {}
    return {mode.name: sorted({graph.num_tokens for graph in graphs}) for mode, graphs in kinds.items()}


async def compare_with_plan(app: Any) -> bool:
    """Compare the started engine with the plan in the environment variable SLIMQWEN_PLAN, and log the differences.

    Args:
        app: vLLM's application.

    Returns:
        False if REQUIRE_PLAN=1 is set, and the engine differs from its plan or could not be compared. True otherwise,
        also without a plan.
    """
    if VARIABLE not in os.environ:
        return True
    expected = PlanExpectation.model_validate_json(os.environ[VARIABLE])
    try:
        lines = list_differences(expected, await collect_facts(app))
        _keep_result(expected, lines)
    except Exception as error:
        lines = [f"nothing could be compared: {error!r}"]
    for line in lines:
        logger.warning("Not as planned (%s): %s", expected.plan, line)
    if not lines:
        logger.info("As planned (%s): all of %d facts", expected.plan, len(expected.facts))
    elif expected.required:
        logger.error(
            "PlanError: REQUIRE_PLAN=1, and the engine differs from its plan (%s): %s; make a new plan with "
            "`slimqwen plan --record`, or serve without REQUIRE_PLAN",
            expected.plan,
            "; ".join(lines),
        )
    return not (lines and expected.required)


def _keep_result(expected: PlanExpectation, lines: Iterable[str]) -> None:
    if not expected.result_file:
        return
    names = [line.partition(": ")[0] for line in lines]
    compared = {"plan": expected.plan, "facts": len(expected.facts), "differences": names}
    with contextlib.suppress(OSError):  # a read-only file system
        file = Path(expected.result_file)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(compared), encoding="utf-8")
