"""The rank of a token among its log-probabilities, counted on a CPU without compiling a kernel for it.

vLLM compiles `(x >= values).sum(-1)` by torch (`batched_count_greater_than` in vllm/v1/sample/ops/logprobs.py), to save
a copy that a GPU would miss: one byte for each token of the vocabulary. The first request with log-probabilities then
waits for two seconds until it is traced and loaded, and for twenty where no cache has it and a C++ compiler has to make
it, in servers that compile nothing else too.

Goes away when vLLM compiles it on a GPU alone.
"""

from typing import Any

from slimqwen.vllm_plugin.engine_fixes.upstream import expect, replace

_FIX = "eager_ranks"
WHY = "vLLM would compile a kernel at the first request with log-probabilities"


def install() -> bool:
    """Have vLLM's sampler count ranks by torch's own operators; False if it does."""
    from vllm.v1.sample import sampler

    count: Any = getattr(sampler.batched_count_greater_than, "_torchdynamo_orig_callable", None)
    expect(
        _FIX, count is not None, f"{sampler.__name__} counts ranks by a function that torch does not compile"
    )
    return replace(_FIX, sampler, "batched_count_greater_than", lambda stock, x, values: count(x, values))
