"""A request with top_k and without top_p is answered beside speculation, on a CPU.

A server that speculates hands the rows of all drafts of a step to the rejection sampler, even where a step has none:
that of a prompt, for example. A CPU without Triton applies a top-k without a top-p by a function that takes the largest
k of all rows (`apply_top_k_only` in `vllm/v1/sample/ops/topk_topp_sampler.py`). Without rows the engine ends: "max():
Expected reduction dim to be specified for input.numel() == 0".

Goes away when `apply_top_k_only` takes logits of no rows, or the rejection sampler is not asked where there are no
drafts.
"""

from collections.abc import Callable

import torch

from slimqwen.vllm_plugin.engine_fixes.upstream import lacks_triton, replace

_FIX = "top_k_without_drafts"
WHY = "a request with top_k alone ends an engine that speculates"
is_needed = lacks_triton


def install() -> bool:
    """Leave logits of no rows as they are; False if they are left already."""
    from vllm.v1.sample.ops import topk_topp_sampler

    def apply_top_k_only(
        stock: Callable[..., torch.Tensor], logits: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor:
        return stock(logits, k) if len(logits) else logits

    return replace(_FIX, topk_topp_sampler, "apply_top_k_only", apply_top_k_only)
