"""Give vLLM's short convolution the stride that it needs for a prompt of one token, on a CPU.

vLLM's C++ kernel, used on CPUs whose vector unit has bfloat16, needs [channels, tokens] in which the stride from token
to token is the number of channels. A single token has the stride of the tensor from which it was cut: torch counts it
as contiguous whatever its stride, so it copies nothing. A prompt of one token then ends the engine:
"causal_conv1d_fwd_cpu: expect x to be transposed".

Remove this fix when vLLM's kernel ignores the stride of a dimension of size 1.
"""

from collections.abc import Callable
from typing import Any

import torch

from slimqwen.vllm_plugin.patches.upstream import replace

_FIX = "lone_token"
_PARAMETERS = (
    "x", "weight", "bias", "conv_states", "query_start_loc", "cache_indices", "has_initial_state",
    "silu_activation", "is_weight_packed",
)  # fmt: skip


def install() -> bool:
    """Make vLLM's CPU attention give a single token the stride that its kernel needs.

    Returns:
        False if it is installed already in this process.
    """
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    def convolve(stock: Callable[..., torch.Tensor], *, x: torch.Tensor, **others: Any) -> torch.Tensor:
        if x.shape[1] == 1:
            x = x.reshape(1, -1).transpose(0, 1)
        return stock(x=x, **others)

    return replace(_FIX, gdn_attention, "_causal_conv1d_fwd_cpu", convolve, _PARAMETERS)
