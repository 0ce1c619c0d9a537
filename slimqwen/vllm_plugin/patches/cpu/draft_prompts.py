"""Leave out attention of an MTP head at prompt tokens from which nothing is drafted, on a CPU.

An MTP head reads every token of a prompt, because drafting needs its keys and values. Only the last token's output is
used (`token_indices_to_sample` in `vllm/v1/spec_decode/llm_base_proposer.py`), and a head of a single layer has no
further layer that would read the others. vLLM computes them all: for 2,000 tokens of the embedded model the head's
attention takes 52 ms of CPU time, as long as the attention of the model itself.

With this fix the head attends from the last 64 tokens of each request in a step; the outputs of the others are zero.

Remove this fix when vLLM's proposer does so itself.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import torch

from slimqwen.vllm_plugin.patches.upstream import expect, replace

_FIX = "draft_prompts"
_KEPT = 64  # tokens of a request; more than any number of drafts, from one of which the next are drafted
_HEAD = re.compile(r"(^|\.)mtp\.layers\.\d+\.")
_METADATA = {
    "query_start_loc",
    "seq_lens",
    "scheduler_metadata",
    "num_actual_tokens",
    "max_query_len",
    "causal",
}


def last_rows(starts: torch.Tensor, kept: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of the last rows of each request, at most `kept` each, and where each request begins among them.

    Args:
        starts: int [requests + 1], where each request begins in a step.
    """
    ends = starts[1:].tolist()
    begins = [max(begin, end - kept) for begin, end in zip(starts[:-1].tolist(), ends, strict=True)]
    rows = torch.cat([torch.arange(begin, end) for begin, end in zip(begins, ends, strict=True)])
    lengths = torch.tensor([0, *(end - begin for begin, end in zip(begins, ends, strict=True))])
    return rows, lengths.cumsum(0).to(starts.dtype)


def install() -> bool:
    """Make vLLM's attention on a CPU compute the last rows of an MTP head alone.

    Returns:
        False if it is installed already in this process.
    """
    from vllm import _custom_ops, envs
    from vllm.forward_context import get_forward_context
    from vllm.v1.attention.backends import cpu_attn

    fields = {field.name for field in dataclasses.fields(cpu_attn.CPUAttentionMetadata)}
    expect(_FIX, fields >= _METADATA, f"CPUAttentionMetadata lacks {', '.join(sorted(_METADATA - fields))}")

    def is_lone_head(name: str) -> bool:
        layers = get_forward_context().no_compile_layers
        return bool(_HEAD.search(name)) and sum(bool(_HEAD.search(other)) for other in layers) == 1

    def forward(
        stock: Callable[..., torch.Tensor],
        self: Any,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        scales = output_scale, output_block_scale
        if (
            attn_metadata is None
            or attn_metadata.max_query_len <= _KEPT
            or attn_metadata.causal is not True
            or self.sliding_window != -1
            or not is_lone_head(layer.layer_name)
        ):
            return stock(self, layer, query, key, value, kv_cache, attn_metadata, output, *scales)
        rows, starts = last_rows(attn_metadata.query_start_loc, _KEPT)
        last = dataclasses.replace(
            attn_metadata,
            num_actual_tokens=len(rows),
            max_query_len=_KEPT,
            query_start_loc=starts,
            scheduler_metadata=_custom_ops.cpu_attn_get_scheduler_metadata(
                num_reqs=len(starts) - 1,
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_size,
                seq_lens=attn_metadata.seq_lens,
                dtype=query.dtype,
                query_start_loc=starts,
                causal=True,
                sliding_window_size=-1,
                isa=layer.isa,
                enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
                dynamic_causal=None,
                kv_cache_dtype=self.kv_cache_dtype,
            ),
        )
        computed = torch.empty_like(output[: len(rows)])
        stock(self, layer, query[rows], key, value, kv_cache, last, computed, *scales)
        output.zero_()
        output[rows] = computed
        return output

    return replace(_FIX, cpu_attn.CPUAttentionBackendImpl, "forward", forward)
