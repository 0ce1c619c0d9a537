"""Inspect model classes in this process on a CPU instead of in a subprocess.

vLLM inspects what a model class supports in a subprocess, which imports vLLM anew (10 to 20 s at the first start with a
new compile cache), so that CUDA is not initialised in this process (`_LazyRegisteredModel.inspect_model_cls` in
vllm/model_executor/models/registry.py). A CPU has no CUDA, and this process imports the class anyway.

Remove this fix when vLLM uses a subprocess only on a GPU.
"""

from slimqwen.vllm_plugin.patches.upstream import replace

_FIX = "model_inspection"


def install() -> bool:
    """Make vLLM inspect model classes in this process; False if it is installed already in this process."""
    from vllm.model_executor.models import registry

    return replace(_FIX, registry, "_run_in_subprocess", lambda stock, fn: fn())
