"""Load compiled graphs that were saved on a CPU.

On a CPU vLLM traces once and leaves the graph to torch's own inductor backend. The graph that this backend saves is
loaded as a plain function, but `_try_load_aot_compiled_fn` in `vllm/compilation/decorators.py` calls its method
`finalize_loading`, which only graphs of vLLM's own backend, for GPUs, have. So loading fails at its last step with
"'function' object has no attribute 'finalize_loading'", and every start compiles anew.

Remove this fix when vLLM checks for the method before it calls it, or when torch returns an object that has it.
"""

from collections.abc import Callable
from typing import Any

from slimqwen.vllm_plugin.patches.upstream import expect, replace

_FIX = "aot_load"


def install() -> bool:
    """Give the functions that torch loads the method that vLLM calls; False if they have it already."""
    from torch._dynamo import aot_compile_types as upstream

    saved = getattr(upstream, "BundledAOTAutogradSerializableCallable", None)
    expect(_FIX, saved is not None, f"{upstream.__name__} has no BundledAOTAutogradSerializableCallable")

    def load(stock: Callable[[type, bytes], Any], cls: type, data: bytes) -> Any:
        loaded = stock(cls, data)
        # The method has nothing to do: torch has loaded the kernels already.
        loaded.finalize_loading = lambda vllm_config: None
        return loaded

    return replace(_FIX, saved, "deserialize_compile_artifacts", load)
