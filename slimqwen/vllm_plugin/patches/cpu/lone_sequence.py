"""Give vLLM's kernel a contiguous state index for a step with one token of a single sequence, with drafts on a CPU.

With MTP the table of state blocks has a column for each drafted token, and a view of its first column has the stride of
the table. Torch counts a column of one row as contiguous whatever its stride, so it copies nothing, but vLLM's kernel
checks the stride. A prompt whose last part has one token (2,049 tokens at 2,048 per step) then ends the engine:
"tensormust be contiguous at last dimension" (`_spec_aware_nonspec` in
`vllm/model_executor/layers/mamba/ops/cpu/gdn_attention.py`).

Remove this fix when vLLM's kernel ignores the stride of a dimension of size 1.
"""

from collections.abc import Callable
from typing import Any

import torch

from slimqwen.vllm_plugin.patches.upstream import replace

_FIX = "lone_sequence"
_KERNEL = "fused_sigmoid_gating_delta_rule_update_cpu"
_PARAMETERS = (
    "A_log", "dt_bias", "q", "k", "v", "a", "b", "initial_state_source", "initial_state_indices", "cu_seqlens",
    "use_qk_l2norm_in_kernel", "softplus_beta", "softplus_threshold",
)  # fmt: skip


def install() -> bool:
    """Pass a single state index to vLLM's kernel with the stride that the kernel needs.

    Returns:
        False if it is installed already in this process.
    """
    from vllm import _custom_ops

    def update_states(
        stock: Callable[..., torch.Tensor], *, initial_state_indices: torch.Tensor, **others: Any
    ) -> torch.Tensor:
        if initial_state_indices.numel() == 1:
            initial_state_indices = initial_state_indices.as_strided((1,), (1,))
        return stock(initial_state_indices=initial_state_indices, **others)

    return replace(_FIX, _custom_ops, _KERNEL, update_states, _PARAMETERS)
