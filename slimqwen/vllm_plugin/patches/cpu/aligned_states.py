"""Prefix caching with MTP on a CPU: copy Gated DeltaNet states at block boundaries without Triton.

With prefix caching a hybrid model keeps its states in blocks ("align" mode). Before a step, a state is copied to the
block that the step will write; after the step, the state at the last full block is kept for later prefix hits. With
drafts, only Triton kernels do both (`precopy_mamba_align_fused_kernel`, `postprocess_mamba_fused_kernel` in
`vllm/v1/worker/mamba_utils.py`), so on a CPU the first request ends the engine. This fix makes the same decisions in
Python, and copies the bytes with `memmove`.

Remove this fix when vLLM's CPU platform registers overrides of the two kernels in `register_triton_kernel_overrides`,
as it does for `batch_memcpy_kernel`.
"""

import ctypes
from collections.abc import Iterator
from typing import Any

import torch

from slimqwen.vllm_plugin.patches.upstream import expect, lacks_triton, replace

_FIX = "aligned_states"
is_needed = lacks_triton
_BLOCK_ID_BYTES = 4


def install() -> bool:
    """Make vLLM copy states in Python; False if it is installed already in this process."""
    from vllm.v1.worker import mamba_utils

    context = getattr(mamba_utils, "MambaSpecDecodeGPUContext", None)
    expect(_FIX, context is not None, "vllm.v1.worker.mamba_utils has no MambaSpecDecodeGPUContext")
    return replace(_FIX, context, "run_fused_precopy", run_precopy) and replace(
        _FIX, context, "run_fused_postprocess", run_postprocess
    )


def run_precopy(
    stock: object,
    self: Any,
    num_reqs: int,
    state_idx_gpu: torch.Tensor,
    src_col_gpu: torch.Tensor,
    token_bias_gpu: torch.Tensor,
    idx_mapping: torch.Tensor | None,
) -> None:
    """Copy the state of each request to the block that the next step writes.

    Args:
        stock: unused.
        self: vLLM's MambaSpecDecodeGPUContext.
        num_reqs: requests in the batch.
        state_idx_gpu: int32 [num_reqs or more], column of the block table that the step writes.
        src_col_gpu: int32, column that has the state now; -1 for a new request.
        token_bias_gpu: int32, number of accepted drafted tokens of the last step.
        idx_mapping: always None: only vLLM's V2 runner, which a CPU does not have, passes one.
    """
    if num_reqs == 0 or not self.is_initialized:
        return
    expect(_FIX, idx_mapping is None, "run_fused_precopy got an idx_mapping")
    columns = (state_idx_gpu, src_col_gpu, token_bias_gpu)
    for request, (target, source, bias) in enumerate(_per_request(num_reqs, *columns)):
        if source >= 0 and source != target:
            _copy_states(self, request, source, target, bias)


def run_postprocess(
    stock: object,
    self: Any,
    num_reqs: int,
    num_accepted_tokens_gpu: torch.Tensor,
    mamba_state_idx_gpu: torch.Tensor,
    num_scheduled_tokens_gpu: torch.Tensor,
    num_computed_tokens_gpu: torch.Tensor,
    num_draft_tokens_gpu: torch.Tensor,
) -> None:
    """Keep the state at the last full block of each request whose accepted tokens went past the end of that block.

    `num_accepted_tokens_out` gets 1 where the state moved within its own block, else the number of accepted tokens.

    Args:
        stock: unused.
        self: vLLM's MambaSpecDecodeGPUContext.
        num_reqs: requests in the batch.
        num_accepted_tokens_gpu: int32 [num_reqs or more], accepted drafted tokens of the step, plus the token after.
        mamba_state_idx_gpu: int32, column of the block table that the step has written.
        num_scheduled_tokens_gpu: int32, number of tokens of the step, drafted ones included.
        num_computed_tokens_gpu: int32, number of tokens before the step.
        num_draft_tokens_gpu: int32, number of drafted tokens of the step.
    """
    if num_reqs == 0 or not self.is_initialized:
        return
    self.num_accepted_tokens_out[:num_reqs].copy_(num_accepted_tokens_gpu[:num_reqs])
    numbers = _per_request(
        num_reqs,
        num_accepted_tokens_gpu,
        mamba_state_idx_gpu,
        num_scheduled_tokens_gpu,
        num_computed_tokens_gpu,
        num_draft_tokens_gpu,
    )
    for request, (accepted, source, scheduled, computed, drafts) in enumerate(numbers):
        before_drafts = computed + scheduled - drafts
        full_blocks = (before_drafts + accepted - 1) // self.block_size
        bias = full_blocks * self.block_size - before_drafts
        if bias < 0:
            continue
        target = full_blocks - 1
        if source == target:
            self.num_accepted_tokens_out[request] = 1
        if source != target or bias > 0:
            _copy_states(self, request, source, target, bias)


def _per_request(num_reqs: int, *tensors: torch.Tensor) -> Iterator[tuple[int, ...]]:
    return zip(*(tensor[:num_reqs].tolist() for tensor in tensors), strict=True)


def _copy_states(context: Any, request: int, source: int, target: int, bias: int) -> None:
    """Copy every state of a request from one column of its block table to another.

    The window of a convolution is shifted by `bias` tokens. A recurrent state has a column for each drafted token, so
    the column `bias` places after `source` is copied.
    """
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    expect(_FIX, not is_conv_state_dim_first(), "VLLM_SSM_CONV_STATE_LAYOUT is DS; only SD is supported")
    states = zip(
        context.state_base_addrs.tolist(),
        context.state_block_strides.tolist(),
        context.state_elem_sizes.tolist(),
        context.state_inner_sizes.tolist(),
        context.state_conv_widths.tolist(),
        context.state_group_indices.tolist(),
        strict=True,
    )
    tables = context.block_table_ptrs.tolist()
    for base, stride, element, inner, width, group in states:
        row = tables[group] + request * context.block_table_stride_req * _BLOCK_ID_BYTES
        destination = base + _block_id(row, target) * stride
        if width > 0:
            window = base + _block_id(row, source) * stride + bias * inner * element
            ctypes.memmove(destination, window, (width - bias) * inner * element)
        else:
            ctypes.memmove(destination, base + _block_id(row, source + bias) * stride, inner * element)


def _block_id(row_address: int, column: int) -> int:
    return ctypes.c_int32.from_address(row_address + column * _BLOCK_ID_BYTES).value
