"""Changes of settings that tune tries beside the best drafts, one row each.

`when` has conditions on the plan of the changed server, as in eval/known_trouble.yaml. Names in braces stand for
figures of the plan without the change. vLLM's parser and the plan refuse what the device does not have.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slimqwen.checkpoint.weights import Weight, read_weights
from slimqwen.formats.compressed_tensors import PackedIntegers
from slimqwen.identity.effects import may_round
from slimqwen.plan import trouble
from slimqwen.plan.facts import Plan

_MOST_GRAPHS = 16
"""Requests up to which a graph for each number of them is tried; above it vLLM's own sizes are as near."""


def _is_4_bit_groups(weight: Weight) -> bool:
    layout = weight.layout
    if not isinstance(layout, PackedIntegers):
        return False
    return layout.bits == 4 and layout.symmetric and layout.group_size is not None


@dataclass(frozen=True)
class SettingsChange:
    """A change of serving settings that `slimqwen tune` may try.

    Attributes:
        lines: lines of config.env; an empty value unsets.
        speculation: fields to set in vLLM's speculative config.
        when: conditions on the plan of the changed server; unless they hold, the change has no effect or vLLM dies.
        takes: whether vLLM can serve a quantised weight with this change; None if it can serve any.
        of_sampling: whether it affects only sampled requests, so that it is tried only at a temperature above 0.
    """

    name: str
    lines: Mapping[str, str] = field(default_factory=dict)
    when: Mapping[str, Any] = field(default_factory=dict)
    speculation: Mapping[str, Any] = field(default_factory=dict)
    takes: Callable[[Weight], bool] | None = None
    of_sampling: bool = False

    @property
    def rounds(self) -> bool:
        """Whether it makes vLLM round differently, as an FP8 KV cache does; only the gate can judge it."""
        return any(map(may_round, self.lines))

    def find_obstacle(self, plan: Plan, weights: Path) -> str:
        """Why the change cannot be tried: a condition does not hold, or a weight's format does not suit; else empty."""
        for name, condition in self.when.items():
            if not trouble.meets(plan, {name: condition}):
                return f"not here: {name} is not {condition}"
        if self.takes is not None:
            for weight in read_weights(weights).values():
                if weight.is_quantised and not self.takes(weight):
                    return f"not with {weight.name} as it is packed"
        return ""


_CACHE, _HAS_CACHE = "VLLM_ENABLE_PREFIX_CACHING", {"prefix_caching": True}
_IS_HYBRID = {"linear_attention": True}
_MODEL_DRAFTS = {"speculative_method": ["mtp", "eagle3", "dflash", "dspark", "draft_model"]}
_BUDGET, _GRAPHS = "VLLM_MAX_NUM_BATCHED_TOKENS", "VLLM_CUDAGRAPH_CAPTURE_SIZES"
_KV, _ATTENTION = "VLLM_KV_CACHE_DTYPE", "VLLM_ATTENTION_BACKEND"
_STATES = "VLLM_MAMBA_SSM_CACHE_DTYPE"

ROWS = (
    SettingsChange("prefix cache", {_CACHE: "{cache_on}"}, _HAS_CACHE),
    # Without the unit a hit on a hybrid is whole blocks of 128 to 2,176 tokens, and shorter prompts find nothing.
    SettingsChange(
        "prefix cache in steps of 32",
        {_CACHE: "1", "VLLM_MAMBA_CACHE_MODE": "align", "VLLM_PREFIX_MATCH_UNIT": "32"},
        _HAS_CACHE | _IS_HYBRID,
    ),
    SettingsChange("no prefix cache", {_CACHE: "{cache_off}"}),
    SettingsChange("half the token budget", {_BUDGET: "{half_budget}"}),
    SettingsChange("twice the token budget", {_BUDGET: "{twice_budget}"}),
    SettingsChange("long prompts in chunks of 512", {"VLLM_LONG_PREFILL_TOKEN_THRESHOLD": "512"}),
    # A start on a cold compile cache profiles a pool that is up to 28,000 tokens smaller.
    SettingsChange("pinned KV pool", {"VLLM_KV_CACHE_MEMORY_BYTES": "{pool_bytes}"}),
    SettingsChange("a graph for each batch", {_GRAPHS: "{graph_sizes}"}),
    SettingsChange("vLLM's graph sizes", {_GRAPHS: ""}),
    SettingsChange("Triton attention", {_ATTENTION: "TRITON_ATTN"}),
    SettingsChange("FlashInfer attention", {_ATTENTION: "FLASHINFER"}),
    SettingsChange(
        "adaptive verification", when=_MODEL_DRAFTS, speculation={"enable_adaptive_verification": True}
    ),
    SettingsChange(
        "probabilistic drafts",
        when=_MODEL_DRAFTS,
        speculation={"draft_sample_method": "probabilistic"},
        of_sampling=True,
    ),
    # Model runner V1 accepts this method, but verifies each token by itself.
    SettingsChange(
        "block verification",
        when={"num_speculative_tokens": "> 0", "model_runner": "V2"},
        speculation={"rejection_sample_method": "block"},
        of_sampling=True,
    ),
    SettingsChange("FP8 KV", {_KV: "fp8"}),
    SettingsChange("int8 KV", {_KV: "int8_per_token_head", _ATTENTION: "TRITON_ATTN"}),
    SettingsChange("bfloat16 states", {_STATES: "bfloat16"}, _IS_HYBRID),
    # float16 has more bits for a state, but CUDA's fused decode kernel does not take it since 0.31.
    SettingsChange("float16 states", {_STATES: "float16"}, _IS_HYBRID),
    # Machete and Humming ignore it; Marlin dies on other weights (marlin.py:79 and marlin_utils.py:786 of vLLM 0.32).
    SettingsChange(
        "int8 activations",
        {"VLLM_MARLIN_INPUT_DTYPE": "int8"},
        {"linear_kernels": "MarlinLinearKernel"},
        takes=_is_4_bit_groups,
    ),
)


def figures_of(plan: Plan) -> dict[str, str]:
    """Values from a plan that settings are computed from, by their names in `ROWS`; fewer if the plan failed."""
    figures: dict[str, str] = {}
    if plan.engine:
        budget, requests = plan.engine.max_num_batched_tokens, plan.engine.max_num_seqs
        figures |= {"half_budget": str(budget // 2), "twice_budget": str(2 * budget)}
        figures |= {"cache_off": "0"} if plan.engine.prefix_caching else {"cache_on": "1"}
        if requests <= _MOST_GRAPHS:
            tokens = 1 + plan.engine.num_speculative_tokens
            figures["graph_sizes"] = ",".join(str(tokens * count) for count in range(1, requests + 1))
    if plan.kv_cache:
        figures["pool_bytes"] = str(plan.kv_cache.available_bytes)
    return figures


def list_changes(figures: Mapping[str, str], *, rounding: bool, sampling: bool) -> Iterator[SettingsChange]:
    """Yield the changes of settings that can be tried, from the table `ROWS`.

    Names in braces in a row's config.env lines are replaced by figures of a plan. A row that names an unknown figure is
    left out.

    Args:
        figures: values for the names in braces, from `figures_of`.
        rounding: whether to include changes that make vLLM round differently.
        sampling: whether to include changes that affect only sampled requests.
    """
    for row in ROWS:
        if (row.rounds and not rounding) or (row.of_sampling and not sampling):
            continue
        try:
            yield replace(row, lines={key: value.format_map(figures) for key, value in row.lines.items()})
        except KeyError:  # a figure that the plan does not have
            continue
