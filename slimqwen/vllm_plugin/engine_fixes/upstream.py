"""Checks that vLLM is as the fixes expect, replacement of its functions, and the error of a failed check."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from slimqwen.errors import SlimqwenError

WRITTEN_FOR = "0.32.0"
"""The vLLM version whose internals the fixes were written against and tested with."""

_KERNEL_METHODS = {"get_min_capability", "can_implement", "process_weights_after_loading", "apply_weights"}


class EngineFixError(SlimqwenError):
    """A fix is needed, but the code of vLLM that it replaces is not that for which it was written.

    The error stops the engine before a model is loaded: without the fix, wrong tokens, a crash or corrupted memory
    would follow later, and nothing would say why.
    """

    def __init__(self, fix: str, difference: str) -> None:
        from vllm import __version__

        super().__init__(
            f"engine fix {fix}: {difference}. The fix was written for vLLM {WRITTEN_FOR}, this is {__version__}; "
            f"install {WRITTEN_FOR}, or adapt the module {fix} of slimqwen/vllm_plugin/engine_fixes"
        )


def lacks_triton() -> bool:
    """Whether vLLM replaces Triton's kernels on this machine, as it does on a CPU without Triton."""
    from vllm.triton_utils import HAS_TRITON

    return not HAS_TRITON


def expect(fix: str, holds: bool, difference: str) -> None:
    """Check that an expectation about vLLM holds.

    Raises:
        EngineFixError: `holds` is False; `difference` says how vLLM differs.
    """
    if not holds:
        raise EngineFixError(fix, difference)


def expect_parameters(fix: str, function: Callable[..., Any], names: Sequence[str]) -> None:
    """Check that a function has exactly the parameters of these names, in this order.

    Raises:
        EngineFixError: the function has others.
    """
    taken = list(inspect.signature(function).parameters)
    called = f"{function.__module__}.{function.__qualname__}"
    expect(fix, taken == list(names), f"{called} takes ({', '.join(taken)}), not ({', '.join(names)})")


def is_replaced(owner: Any, name: str) -> bool:
    """Whether `replace` has replaced the function `name` of `owner`."""
    return getattr(getattr(owner, name, None), "replaces_stock", False)


def replace(
    fix: str,
    owner: Any,
    name: str,
    replacement: Callable[..., Any],
    parameters: Sequence[str] | None = None,
) -> bool:
    """Replace a function of vLLM or torch; False if it is replaced already.

    Args:
        owner: module or class of the function; class methods and static methods stay such.
        name: name of the function.
        replacement: function that is called with the stock function, then the caller's arguments.
        parameters: names of the parameters that the stock function has to have; by default those of `replacement`
            after its first one, or any if those are `*arguments`.

    Raises:
        EngineFixError: the function is gone or has other parameters.
    """
    if is_replaced(owner, name):
        return False
    attribute = inspect.getattr_static(owner, name, None)
    method = type(attribute) if isinstance(attribute, classmethod | staticmethod) else None
    stock: Any = attribute.__func__ if isinstance(attribute, classmethod | staticmethod) else attribute
    expect(fix, callable(stock), f"{owner.__name__} has no function {name}")
    _, *own = inspect.signature(replacement).parameters.values()
    if parameters is not None or not any(parameter.kind is parameter.VAR_POSITIONAL for parameter in own):
        expect_parameters(fix, stock, parameters or [parameter.name for parameter in own])

    @functools.wraps(stock)
    def call(*arguments: Any, **keywords: Any) -> Any:
        return replacement(stock, *arguments, **keywords)

    call.replaces_stock = True  # type: ignore[attr-defined]
    setattr(owner, name, method(call) if method else call)
    return True


def mixed_precision_kernels(fix: str, products: Sequence[str]) -> list[Any]:
    """The list of kernels from which vLLM chooses for packed linears on a CPU; the caller may change the list.

    Args:
        products: operators of aten that the kernel of the fix calls.

    Raises:
        EngineFixError: the list or an operator is gone, or a kernel has to have other methods.
    """
    import torch
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel
    from vllm.platforms.interface import PlatformEnum

    kernels = getattr(linear, "_POSSIBLE_KERNELS", {}).get(PlatformEnum.CPU)
    expect(fix, isinstance(kernels, list), "vLLM has no list of mixed-precision kernels for the CPU")
    methods: frozenset[str] = getattr(MPLinearKernel, "__abstractmethods__", frozenset())
    expect(fix, methods == _KERNEL_METHODS, f"an MPLinearKernel must now have {', '.join(sorted(methods))}")
    for product in products:
        expect(fix, hasattr(torch.ops.aten, product), f"torch {torch.__version__} has no aten::{product}")
    assert isinstance(kernels, list)
    return kernels
