"""A compiled graph that was saved is loaded again, on a CPU.

On a CPU vLLM traces once and leaves the graph to torch's own inductor backend. What that saves comes back from disk
as a plain function, but `_try_load_aot_compiled_fn` in `vllm/compilation/decorators.py` calls `finalize_loading` on
it, a method of the serialisable function of vLLM's own backend, which a GPU uses. The load fails at its last step
with "'function' object has no attribute 'finalize_loading'" and every start compiles anew.

Goes away when vLLM asks for the method before it calls it, or when torch gives back an object that has it.
"""

from collections.abc import Callable
from typing import Any

from slimqwen.vllm_plugin.engine_fixes.upstream import expect, replace

_FIX = "aot_load"
WHY = "vLLM cannot load the graphs that torch's inductor backend saved"


def install() -> bool:
    """Give what torch loads the method that vLLM calls; False if that was done before."""
    from torch._dynamo import aot_compile_types as upstream

    saved = getattr(upstream, "BundledAOTAutogradSerializableCallable", None)
    expect(_FIX, saved is not None, f"{upstream.__name__} has no BundledAOTAutogradSerializableCallable")

    def load(stock: Callable[[type, bytes], Any], cls: type, data: bytes) -> Any:
        loaded = stock(cls, data)
        # Nothing is left to do: torch has loaded the kernels already.
        loaded.finalize_loading = lambda vllm_config: None
        return loaded

    return replace(_FIX, saved, "deserialize_compile_artifacts", load)
