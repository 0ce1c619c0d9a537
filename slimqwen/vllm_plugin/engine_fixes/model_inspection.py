"""Model classes looked at in this process on a CPU.

vLLM asks a model class what it supports in a process of its own, which imports vLLM anew (10 to 20 s at the first start
of a compile cache), lest CUDA be initialised in this one (`_LazyRegisteredModel.inspect_model_cls` in
vllm/model_executor/models/registry.py). A CPU has none, and the class is imported here anyway.

Goes away when vLLM does so only on a GPU.
"""

import functools
from collections.abc import Callable
from typing import TypeVar

from slimqwen.vllm_plugin.engine_fixes.upstream import expect_parameters

_FIX = "model_inspection"
_Answer = TypeVar("_Answer")


def reason() -> str | None:
    """Why every CPU needs the fix."""
    return "vLLM would be imported once more to look at the model's class"


def install() -> bool:
    """Have vLLM look at model classes in this process; False if it does.

    Raises:
        EngineFixError: vLLM starts the other process in another way.
    """
    from vllm.model_executor.models import registry

    run_in_subprocess = registry._run_in_subprocess
    if hasattr(run_in_subprocess, "__wrapped__"):
        return False
    expect_parameters(_FIX, run_in_subprocess, ("fn",))

    @functools.wraps(run_in_subprocess)
    def run(fn: Callable[[], _Answer]) -> _Answer:
        return fn()

    registry._run_in_subprocess = run
    return True
