"""Compares vLLM with what the patches expect, replaces its functions, and defines the error of a failed comparison."""

import ast
import functools
import hashlib
import importlib
import inspect
import json
import logging
import os
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from packaging.version import Version

from slimqwen.errors import SlimqwenError
from slimqwen.vllm_plugin.patches.patch import Patch
from slimqwen.vllm_plugin.patches.table import KNOWN_VERSIONS, PATCHES

ALLOWED = "ALLOW_UNTESTED_VLLM"
"""Variable of the shell: 1 to start with a vLLM that the patches were not tested with.

No key of config.env, because it is about what is installed and not about a variant."""

_KERNEL_METHODS = {"get_min_capability", "can_implement", "process_weights_after_loading", "apply_weights"}

logger = logging.getLogger(__name__)


class PatchError(SlimqwenError):
    """A patch is needed, but the code that it changes is not that for which it was written.

    The error stops the engine before a model is loaded: without the patch, wrong tokens, a crash or corrupted memory
    would follow later, and nothing would say why.
    """

    def __init__(self, file: str, difference: str, cure: str = "adapt the module") -> None:
        known = " or ".join(known_versions())
        super().__init__(
            f"{file} was written for vLLM {known}, this is {installed_version()}: {difference}; {cure}, or install "
            f"{known}"
        )


def known_versions() -> tuple[str, ...]:
    """The versions of vLLM that the patches of this platform were written for."""
    from vllm.platforms import current_platform

    return KNOWN_VERSIONS.get(current_platform.device_type, KNOWN_VERSIONS["cuda"])


def installed_version() -> str:
    """Version of the installed vLLM, without a local part such as +cpu."""
    from vllm import __version__

    return Version(__version__).public


def digest_source(source: str) -> str:
    """Twelve hexadecimal digits of a function's source; comments, docstrings and layout do not count.

    The same for every version of Python that knows the source's syntax, unlike `ast.dump`.
    """
    return hashlib.sha256(json.dumps(_plain(ast.parse(textwrap.dedent(source)))).encode()).hexdigest()[:12]


def _plain(node: Any) -> Any:
    if isinstance(node, ast.AST):
        fields = [[name, _plain(value)] for name, value in ast.iter_fields(node) if value not in (None, [])]
        return [type(node).__name__, *fields]
    if isinstance(node, list):
        return [_plain(each) for each in node if not _is_docstring(each)]
    return repr(node)


def _is_docstring(node: Any) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def list_changes(patch: Patch) -> list[str]:
    """List the places of a patch where the installed code differs from the code it was written for, with the reason.

    The modules of the places are imported, so call it only where vLLM imports them anyway.
    """
    version, known = installed_version(), known_versions()
    digests = patch.digests(version if version in known else known[-1])
    return [f"{place} {why}" for place, digest in digests.items() if (why := _change(place, digest))]


def _change(place: str, digest: str) -> str | None:
    module, _, names = place.partition(":")
    try:
        function: Any = functools.reduce(getattr, names.split("."), importlib.import_module(module))
        # Below the replacement, if another patch has replaced the function.
        found = _digest(inspect.unwrap(function))
    except (ImportError, AttributeError):
        return "is gone"
    except (OSError, TypeError, SyntaxError):
        return "has no source"
    return None if found == digest else "has another body"


@functools.cache  # several patches rely on the same function
def _digest(function: Callable[..., Any]) -> str:
    return digest_source(inspect.getsource(function))


def require(*names: str, of: str) -> None:
    """Check that patches may be made here, and log them: vLLM is a known version, their places have the known bodies.

    Args:
        names: names of the patches, as `table.PATCHES` has them.
        of: part of vLLM that they change, for the log.

    Raises:
        PatchError: vLLM differs, and ALLOW_UNTESTED_VLLM=1 is not set (if it is, a warning says what differs).
    """
    refuse_changes({name: list_changes(PATCHES[name]) for name in names})
    log_patches(names, f"'s {of}")


def refuse_changes(changes: dict[str, list[str]]) -> None:
    """Raise an error for an unknown vLLM, or warn under ALLOW_UNTESTED_VLLM=1.

    Args:
        changes: name of each needed patch -> its places that differ (`list_changes`).

    Raises:
        PatchError: vLLM is no known version, or a place differs.
    """
    found: dict[str, list[str]] = {}
    for name, lines in changes.items():
        if lines:  # a module may hold several patches
            found.setdefault(PATCHES[name].file, []).extend(lines)
    if not found and installed_version() in known_versions():
        return
    cure = f"set {ALLOWED}=1 in the shell to start anyway"
    if found:
        (file, (line, *lines)), *others = found.items()
        more = [*lines, *(f"{other}: {', '.join(each)}" for other, each in others)]
        error = PatchError(file, "; ".join([line, *more]), f"adapt {' and '.join(found)}, {cure}")
    else:
        error = PatchError(
            "slimqwen/vllm_plugin/patches/table.py",
            "every function that the patches change is the same",
            f"run the tests and add the version to KNOWN_VERSIONS, {cure}",
        )
    if not is_untested_allowed():
        raise error
    logger.warning("%s=1: %s", ALLOWED, error)


def is_untested_allowed() -> bool:
    """Whether ALLOW_UNTESTED_VLLM=1 is set."""
    return os.environ.get(ALLOWED) == "1"


def log_patches(names: Sequence[str], of: str = "") -> None:
    """Log which patches are made, in one line; nothing if none is."""
    if names:
        count = f"{len(names)} patch{'es' if len(names) > 1 else ''}"
        logger.info("%s of vLLM %s%s: %s", count, installed_version(), of, ", ".join(names))


def lacks_triton() -> bool:
    """Whether vLLM replaces Triton's kernels on this machine, as it does on a CPU without Triton."""
    from vllm.triton_utils import HAS_TRITON

    return not HAS_TRITON


def expect(patch: str, holds: bool, difference: str) -> None:
    """Check an expectation about vLLM on which a patch relies.

    Args:
        patch: name of the patch.
        holds: whether the expectation holds.
        difference: how vLLM differs if it does not, for the message.

    Raises:
        PatchError: `holds` is False.
    """
    if not holds:
        raise PatchError(PATCHES[patch].file, difference)


def expect_parameters(patch: str, function: Callable[..., Any], names: Sequence[str]) -> None:
    """Check that a function has exactly the parameters of these names, in this order.

    Raises:
        PatchError: the function has others.
    """
    taken = list(inspect.signature(function).parameters)
    called = f"{function.__module__}.{function.__qualname__}"
    expect(patch, taken == list(names), f"{called} takes ({', '.join(taken)}), not ({', '.join(names)})")


def is_replaced(owner: Any, name: str) -> bool:
    """Whether `replace` has replaced the function `name` of `owner`."""
    return getattr(getattr(owner, name, None), "replaces_stock", False)


def replace(
    patch: str,
    owner: Any,
    name: str,
    replacement: Callable[..., Any],
    parameters: Sequence[str] | None = None,
) -> bool:
    """Replace a function of vLLM or torch; False if it is replaced already.

    Args:
        patch: name of the patch, whose row of the table has the function among its places.
        owner: module or class of the function; class methods and static methods stay such.
        name: name of the function.
        replacement: function that is called with the stock function, then the caller's arguments.
        parameters: names of the parameters that the stock function has to have; by default those of `replacement`
            after its first one, or any if those are `*arguments`.

    Raises:
        PatchError: the function is gone or has other parameters.
    """
    if is_replaced(owner, name):
        return False
    place = f"{owner.__name__}:{name}"
    if isinstance(owner, type):
        place = f"{owner.__module__}:{owner.__qualname__}.{name}"
    assert place in PATCHES[patch].places, f"patches/table.py: the row of {patch} lacks {place}"
    attribute = inspect.getattr_static(owner, name, None)
    method = type(attribute) if isinstance(attribute, classmethod | staticmethod) else None
    stock: Any = attribute.__func__ if isinstance(attribute, classmethod | staticmethod) else attribute
    expect(patch, callable(stock), f"{owner.__name__} has no function {name}")
    _, *own = inspect.signature(replacement).parameters.values()
    if parameters is not None or not any(parameter.kind is parameter.VAR_POSITIONAL for parameter in own):
        expect_parameters(patch, stock, parameters or [parameter.name for parameter in own])

    @functools.wraps(stock)
    def call(*arguments: Any, **keywords: Any) -> Any:
        return replacement(stock, *arguments, **keywords)

    call.replaces_stock = True  # type: ignore[attr-defined]
    setattr(owner, name, method(call) if method else call)
    return True


def mixed_precision_kernels(patch: str, products: Sequence[str]) -> list[Any]:
    """The list of kernels from which vLLM chooses for packed linears on a CPU; the caller may change the list.

    Args:
        products: operators of aten that the kernel of the patch calls.

    Raises:
        PatchError: the list or an operator is gone, or vLLM expects other methods of a kernel.
    """
    import torch
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel
    from vllm.platforms.interface import PlatformEnum

    kernels = getattr(linear, "_POSSIBLE_KERNELS", {}).get(PlatformEnum.CPU)
    expect(patch, isinstance(kernels, list), "vLLM has no list of mixed-precision kernels for the CPU")
    methods: frozenset[str] = getattr(MPLinearKernel, "__abstractmethods__", frozenset())
    expect(patch, methods == _KERNEL_METHODS, f"an MPLinearKernel must now have {', '.join(sorted(methods))}")
    for product in products:
        expect(patch, hasattr(torch.ops.aten, product), f"torch {torch.__version__} has no aten::{product}")
    assert isinstance(kernels, list)
    return kernels
