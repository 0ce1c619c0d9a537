"""Copy sampling parameters to the rows of drafted tokens, on a CPU without Triton.

The rejection sampler copies each request's temperature, top-k and top-p to the rows of its drafted tokens
(`expand_batch_to_tokens` in `vllm/v1/sample/rejection_sampler.py`). Without Triton the kernel is replaced by
`_expand_kernel_impl` in `vllm/utils/cpu_triton_utils.py`, whose C++ part supports only int64: it gets `output`
converted to int64, which for any other dtype is a copy that is dropped afterwards. The rows of float32 temperatures and
int32 top-k then have the previous content of the memory, and speculative sampling silently draws from a wrong
distribution.

Remove this fix when `_expand_kernel_impl` writes to the `output` that it was given, as its neighbours already do
(`copy_` after the C++ call).
"""

import sys

import torch

from slimqwen.vllm_plugin.patches.upstream import expect, is_replaced, lacks_triton, replace

_FIX = "sampling_expansion"
is_needed = lacks_triton
_FUNCTION = "_expand_kernel_impl"


def expand(
    stock: object,
    output: torch.Tensor,
    input_val: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,  # noqa: N803 (the launch passes it by this name)
) -> None:
    """Repeat the value of each request once per drafted token of the request, in place.

    Args:
        stock: unused.
        output: [num_tokens], of the dtype of `input_val`; the first cu_num_tokens[-1] elements are written.
        input_val: [batch_size], float32 (temperature, top-p), int32 or int64 (top-k).
        cu_num_tokens: [batch_size], int32 or int64, cumulative number of drafted tokens.
        replace_from: a value to be replaced, such as temperature 0, which means greedy.
        replace_to: the value that replaces `replace_from`.
        MAX_NUM_TOKENS: unused; the size of a block of the Triton kernel.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = input_val.masked_fill(input_val == replace_from, replace_to)
    repeated = values.repeat_interleave(counts)
    output[: repeated.numel()].copy_(repeated)


def install() -> bool:
    """Register `expand` as the CPU platform's kernel; False if it is registered already."""
    from vllm.triton_utils.dispatcher import KernelOverride
    from vllm.utils import cpu_triton_utils

    if is_replaced(cpu_triton_utils, _FUNCTION):
        return False
    # A worker keeps its own reference to the kernel in its sampler, which a later replacement does not reach.
    bound = getattr(sys.modules.get("vllm.v1.sample.rejection_sampler"), "expand_kernel", None)
    difference = "an engine of this process already uses the stock kernel"
    expect(_FIX, not isinstance(bound, KernelOverride), difference)
    return replace(_FIX, cpu_triton_utils, _FUNCTION, expand)
