"""Convolve prompts with vLLM's native kernel beside drafts, too, on a CPU with AVX-512 BF16 and without AMX.

Gated DeltaNet's short convolution of a prompt is a native kernel in vLLM where the vector unit has bfloat16. With
drafts, `_spec_aware_nonspec` in `vllm/model_executor/layers/mamba/ops/cpu/gdn_attention.py` asks for AMX instead, and
else takes torch's `conv1d` with a group for each channel: 5.9 ms instead of 0.9 ms of CPU time for 2,000 tokens of 768
channels. The kernel needs no AMX: on a CPU with AMX vLLM calls it with the same buffers.

Remove this fix when `_spec_aware_nonspec` asks for bfloat16 as `_cpu_gdn_attention_nonspec` does.
"""

from collections.abc import Callable
from typing import Any

import torch

from slimqwen.vllm_plugin.patches.upstream import expect, replace

_FIX = "prompt_convolution"
_WIDTH = 4  # of the convolution, the only one that the kernel knows


def is_needed() -> bool:
    """Whether vLLM has the kernel on this CPU and does not use it beside drafts."""
    return torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported()


def install() -> bool:
    """Make vLLM's torch convolution of prompts call the native kernel.

    Returns:
        False if it is installed already in this process.
    """
    from vllm import _custom_ops
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    expect(
        _FIX, hasattr(_custom_ops, "causal_conv1d_weight_pack"), "vLLM has no packing of convolution weights"
    )
    expect(
        _FIX, hasattr(gdn_attention, "_causal_conv1d_fwd_cpu"), "vLLM has no native convolution of prompts"
    )

    def convolve(stock: Callable[..., torch.Tensor], **given: Any) -> torch.Tensor:
        x, weight, states = given["x"], given["weight"], given["conv_states"]
        if weight.shape[1] != _WIDTH or {x.dtype, weight.dtype, states.dtype} != {torch.bfloat16}:
            return stock(**given)
        activation = given.pop("activation")
        # A copy, because packing may write into its argument.
        packed = _custom_ops.causal_conv1d_weight_pack(weight.contiguous().clone())
        convolved: torch.Tensor = gdn_attention._causal_conv1d_fwd_cpu(
            **{**given, "weight": packed}, silu_activation=activation == "silu", is_weight_packed=True
        )
        return convolved

    taken = (
        "x", "weight", "bias", "conv_states", "query_start_loc", "cache_indices", "has_initial_state", "activation",
        "pad_slot_id", "kwargs",
    )  # fmt: skip
    return replace(_FIX, gdn_attention, "causal_conv1d_torch", convolve, taken)
