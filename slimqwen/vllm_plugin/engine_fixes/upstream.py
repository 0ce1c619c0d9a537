"""What the fixes expect of vLLM, and the error that says where it is no longer so."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from slimqwen.errors import SlimqwenError

WRITTEN_FOR = "0.32.0"
"""The vLLM version whose internals the fixes were written against and tested with."""

_KERNEL_METHODS = {"get_min_capability", "can_implement", "process_weights_after_loading", "apply_weights"}


class EngineFixError(SlimqwenError):
    """A fix is needed, but what it would replace in vLLM is not what it was written for.

    It stops the engine before a model is loaded: going on without the fix would mean wrong tokens, a crash
    or corrupted memory later, with nothing that says why.
    """

    def __init__(self, fix: str, difference: str) -> None:
        from vllm import __version__

        super().__init__(
            f"engine fix {fix}: {difference}. It was written for vLLM {WRITTEN_FOR} and this is {__version__}: "
            f"install that version, or bring the module {fix} up to date"
        )


def lacks_triton() -> bool:
    """Whether vLLM replaces the kernels of Triton here, as it does on a CPU without it."""
    from vllm.triton_utils import HAS_TRITON

    return not HAS_TRITON


def expect(fix: str, holds: bool, difference: str) -> None:
    """Go on only if the expectation holds.

    Raises:
        EngineFixError: it does not; `difference` says what is there instead.
    """
    if not holds:
        raise EngineFixError(fix, difference)


def expect_parameters(fix: str, function: Callable[..., Any], names: Sequence[str]) -> None:
    """Go on only if the function takes exactly the parameters of these names, in this order.

    Raises:
        EngineFixError: it takes others.
    """
    taken = list(inspect.signature(function).parameters)
    called = f"{function.__module__}.{function.__qualname__}"
    expect(fix, taken == list(names), f"{called} takes ({', '.join(taken)}), not ({', '.join(names)})")


def is_replaced(owner: Any, name: str) -> bool:
    """Whether `replace` has put a function there."""
    return getattr(getattr(owner, name, None), "replaces_stock", False)


def replace(
    fix: str,
    owner: Any,
    name: str,
    replacement: Callable[..., Any],
    parameters: Sequence[str] | None = None,
) -> bool:
    """Have calls of a function of vLLM or torch go to another one; False if they do already.

    Args:
        owner: module or class; a class method stays one, and so does a static method.
        replacement: called with the stock function and what the caller gave.
        parameters: those that the stock function has to take; by default those of the replacement after its first,
            or any where these are `*arguments`.

    Raises:
        EngineFixError: the function is gone or takes other parameters.
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
    """The kernels that vLLM may choose for packed linears on a CPU, a list to be changed.

    Args:
        products: operators of aten that the fix's kernel calls.

    Raises:
        EngineFixError: the list or an operator is gone, or a kernel must have other methods.
    """
    import torch
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel
    from vllm.platforms.interface import PlatformEnum

    kernels = getattr(linear, "_POSSIBLE_KERNELS", {}).get(PlatformEnum.CPU)
    expect(fix, isinstance(kernels, list), "there is no list of mixed-precision kernels of the CPU")
    methods: frozenset[str] = getattr(MPLinearKernel, "__abstractmethods__", frozenset())
    expect(fix, methods == _KERNEL_METHODS, f"an MPLinearKernel must now have {', '.join(sorted(methods))}")
    for product in products:
        expect(fix, hasattr(torch.ops.aten, product), f"torch {torch.__version__} has no aten::{product}")
    assert isinstance(kernels, list)
    return kernels
