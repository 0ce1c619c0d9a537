"""Model classes looked at in this process on a CPU.

vLLM asks a model class what it supports in a process of its own, which imports vLLM anew (10 to 20 s at the first start
of a compile cache), lest CUDA be initialised in this one (`_LazyRegisteredModel.inspect_model_cls` in
vllm/model_executor/models/registry.py). A CPU has none, and the class is imported here anyway.

Goes away when vLLM does so only on a GPU.
"""

from slimqwen.vllm_plugin.engine_fixes.upstream import replace

_FIX = "model_inspection"
WHY = "vLLM would be imported once more to look at the model's class"


def install() -> bool:
    """Have vLLM look at model classes in this process; False if it does."""
    from vllm.model_executor.models import registry

    return replace(_FIX, registry, "_run_in_subprocess", lambda stock, fn: fn())
