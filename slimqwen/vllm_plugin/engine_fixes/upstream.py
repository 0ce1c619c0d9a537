"""What the fixes expect of vLLM, and the error that says where it is no longer so."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from slimqwen.errors import SlimqwenError

WRITTEN_FOR = "0.32.0"
"""The vLLM version whose internals the fixes were written against and tested with."""


class EngineFixError(SlimqwenError):
    """A fix is needed, but what it would replace in vLLM is not what it was written for.

    It stops the engine before a model is loaded: going on without the fix would mean wrong tokens, a crash
    or corrupted memory later, with nothing that says why.
    """

    def __init__(self, fix: str, found: str) -> None:
        from vllm import __version__

        super().__init__(
            f"engine fix {fix}: {found}. It was written for vLLM {WRITTEN_FOR} and this is {__version__}: "
            f"install that version, or bring the module {fix} up to date"
        )


def expect(fix: str, holds: bool, found: str) -> None:
    """Go on only if the expectation holds.

    Raises:
        EngineFixError: it does not; `found` says what is there instead.
    """
    if not holds:
        raise EngineFixError(fix, found)


def expect_parameters(fix: str, function: Callable[..., Any], names: Sequence[str]) -> None:
    """Go on only if the function takes exactly the parameters of these names, in this order.

    Raises:
        EngineFixError: it takes others.
    """
    taken = list(inspect.signature(function).parameters)
    called = f"{function.__module__}.{function.__qualname__}"
    expect(fix, taken == list(names), f"{called} takes ({', '.join(taken)}), not ({', '.join(names)})")
