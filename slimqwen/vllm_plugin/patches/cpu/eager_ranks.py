"""Count the ranks of tokens among log-probabilities on a CPU without compiling a kernel.

vLLM compiles `(x >= values).sum(-1)` with torch (`batched_count_greater_than` in vllm/v1/sample/ops/logprobs.py) to
save a copy of one byte per token of the vocabulary, which matters only on a GPU. The first request with
log-probabilities then waits for two seconds until the kernel is traced and loaded, or for twenty if no cache has it and
a C++ compiler has to make it, even in servers that compile nothing else.

Remove this fix when vLLM compiles the kernel only on a GPU.
"""

from typing import Any

from slimqwen.vllm_plugin.patches.upstream import expect, replace

_FIX = "eager_ranks"


def install() -> bool:
    """Make vLLM's sampler count ranks with torch's own operators; False if it is installed already in this process."""
    from vllm.v1.sample import sampler

    count: Any = getattr(sampler.batched_count_greater_than, "_torchdynamo_orig_callable", None)
    expect(
        _FIX, count is not None, f"{sampler.__name__} counts ranks by a function that torch does not compile"
    )
    return replace(_FIX, sampler, "batched_count_greater_than", lambda stock, x, values: count(x, values))
