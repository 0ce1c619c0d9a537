"""The short convolution of a prompt of one token, on a CPU.

vLLM's C++ kernel, which it takes where the vector unit has bfloat16, wants [channels, tokens] with a stride of all
channels from token to token. A lone token keeps the stride of the tensor that it was cut from, for torch counts it as
contiguous whatever its stride and copies nothing; a prompt of one token then ends the engine: "causal_conv1d_fwd_cpu:
expect x to be transposed".

Goes away when vLLM's kernel minds no stride of a dimension of one.
"""

from collections.abc import Callable
from typing import Any

import torch

from slimqwen.vllm_plugin.engine_fixes.upstream import replace

_FIX = "lone_token"
WHY = "vLLM's convolution of prompts ends the engine at a prompt of one token"
_PARAMETERS = (
    "x", "weight", "bias", "conv_states", "query_start_loc", "cache_indices", "has_initial_state",
    "silu_activation", "is_weight_packed",
)  # fmt: skip


def install() -> bool:
    """Have vLLM's CPU attention give a lone token the stride that its kernel wants; False if it does."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    def convolve(stock: Callable[..., torch.Tensor], *, x: torch.Tensor, **others: Any) -> torch.Tensor:
        if x.shape[1] == 1:
            x = x.reshape(1, -1).transpose(0, 1)
        return stock(x=x, **others)

    return replace(_FIX, gdn_attention, "_causal_conv1d_fwd_cpu", convolve, _PARAMETERS)
