"""Synthetic acceptance, `"rejection_sample_method": "synthetic"`, on a CPU without Triton.

With it vLLM accepts a draft by a rate and not by its content, so that speed can be measured at a given acceptance
length. The kernels that replace Triton's on a CPU refuse it: `_rejection_greedy_sample_kernel_impl` and
`_rejection_random_sample_kernel_impl` in `vllm/utils/cpu_triton_utils.py` end with "Synthetic acceptance not supported
with CPU sampling", and the engine with them, at the first draft.

The two functions here do what the Triton kernels of `vllm/v1/sample/rejection_sampler.py` do: the draft at a position
is kept where its uniform number lies below the rate of that position, given that the ones before it were kept. Every
other way of sampling is left to vLLM.

Goes away when the two functions of `cpu_triton_utils` no longer assert that SYNTHETIC_MODE is off.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from slimqwen.vllm_plugin.engine_fixes.upstream import is_replaced, replace, require_unbound

_FIX = "synthetic_acceptance"
_REFUSAL = "assert not SYNTHETIC_MODE"
_PARAMETERS = {
    "_rejection_greedy_sample_kernel_impl": (
        "output_token_ids",
        "cu_num_draft_tokens",
        "draft_token_ids",
        "target_argmax",
        "bonus_token_ids",
        "is_greedy",
        "max_spec_len",
        "uniform_probs",
        "synthetic_conditional_rates",
        "SYNTHETIC_MODE",
    ),
    "_rejection_random_sample_kernel_impl": (
        "output_token_ids",
        "cu_num_draft_tokens",
        "draft_token_ids",
        "draft_probs",
        "target_probs",
        "bonus_token_ids",
        "recovered_token_ids",
        "uniform_probs",
        "is_greedy",
        "max_spec_len",
        "vocab_size",
        "synthetic_conditional_rates",
        "NO_DRAFT_PROBS",
        "SYNTHETIC_MODE",
    ),
}


def accept(
    output: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    drafts: torch.Tensor,
    instead: torch.Tensor,
    bonus: torch.Tensor,
    uniform: torch.Tensor,
    rates: torch.Tensor,
    chosen: torch.Tensor,
) -> None:
    """Keep the drafts of each chosen request up to the first that its rate rejects, in place.

    Args:
        output: [batch_size, K + 1]; gets the drafts kept, then one token of the target.
        cu_num_draft_tokens: [batch_size], running total of draft tokens.
        drafts: [num_tokens]; -1 is padding and never kept.
        instead: [num_tokens], the target's token where the draft at that position is rejected.
        bonus: [batch_size, 1], the target's token after a draft that was kept whole.
        uniform: [num_tokens], numbers in [0, 1).
        rates: [K], share of drafts to keep at each position, of those kept up to the one before.
        chosen: [batch_size], bool: the requests to fill in.
    """
    ends = cu_num_draft_tokens.tolist()
    for request, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        if not chosen[request]:
            continue
        count = end - start
        kept = (uniform[start:end] < rates[:count]) & (drafts[start:end] >= 0)
        length = int(kept.long().cumprod(0).sum())
        output[request, :length] = drafts[start : start + length].to(output.dtype)
        output[request, length] = instead[start + length] if length < count else bonus.flatten()[request]


def reason() -> str | None:
    """Why this machine needs the fix; None where Triton runs the kernels itself."""
    from vllm.triton_utils import HAS_TRITON

    if HAS_TRITON:
        return None
    return "without Triton, vLLM ends at the first draft under synthetic acceptance"


def install() -> bool:
    """Take over both kernels for synthetic acceptance; False if that was done before, or vLLM no longer refuses it."""
    from vllm.utils import cpu_triton_utils as upstream

    if is_replaced(upstream, next(iter(_PARAMETERS))):
        return False
    kernels = [getattr(upstream, name, None) for name in _PARAMETERS]
    if any(kernel and _REFUSAL not in inspect.getsource(kernel) for kernel in kernels):
        return False
    require_unbound(_FIX, "rejection_greedy_sample_kernel")
    for name, parameters in _PARAMETERS.items():
        replace(_FIX, upstream, name, functools.partial(_sample, parameters), parameters)
    return True


def _sample(parameters: tuple[str, ...], stock: Callable[..., None], *values: Any, **more: Any) -> None:
    """The stock kernel, which is called by position, but for synthetic mode."""
    given = {**dict(zip(parameters, values, strict=False)), **more}
    if not given.get("SYNTHETIC_MODE"):
        stock(*values, **more)
        return
    is_random = "recovered_token_ids" in given
    is_greedy = given["is_greedy"]
    every = torch.ones(len(given["output_token_ids"]), dtype=torch.bool)
    accept(
        given["output_token_ids"],
        given["cu_num_draft_tokens"],
        given["draft_token_ids"],
        given["recovered_token_ids" if is_random else "target_argmax"],
        given["bonus_token_ids"],
        given["uniform_probs"],
        given["synthetic_conditional_rates"],
        every if is_greedy is None else ~is_greedy if is_random else is_greedy,
    )
