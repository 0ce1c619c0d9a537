"""Support requests with top_k and without top_p in a server that speculates, on a CPU.

A server that speculates passes the rows of all drafted tokens of a step to the rejection sampler, even if a step has
none, like that of a prompt. A CPU without Triton applies top-k without top-p with a function that takes the largest k
of all rows (`apply_top_k_only` in `vllm/v1/sample/ops/topk_topp_sampler.py`). Without rows the engine ends: "max():
Expected reduction dim to be specified for input.numel() == 0".

Remove this fix when `apply_top_k_only` accepts logits without rows, or when the rejection sampler is not called without
drafts.
"""

from collections.abc import Callable

import torch

from slimqwen.vllm_plugin.patches.upstream import lacks_triton, replace

_FIX = "top_k_without_drafts"
is_needed = lacks_triton


def install() -> bool:
    """Make vLLM return logits without rows unchanged; False if it is installed already in this process."""
    from vllm.v1.sample.ops import topk_topp_sampler

    def apply_top_k_only(
        stock: Callable[..., torch.Tensor], logits: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor:
        return stock(logits, k) if len(logits) else logits

    return replace(_FIX, topk_topp_sampler, "apply_top_k_only", apply_top_k_only)
