"""Compute the short convolution of Gated DeltaNet in float32, on a CPU whose matrix library has no bfloat16.

vLLM's CPU kernels for prompts, and for verify steps, convolve each channel with torch's `conv1d` in bfloat16. If oneDNN
does not support bfloat16, torch uses a fallback, which takes 20 ms of CPU time for five tokens of 576 channels (float32
takes 0.14 ms), half of all time of a speculating engine. Both accumulate in float32 and round once, so the results are
the same bits.

Remove this fix when torch convolves bfloat16 in groups as fast as float32 on such CPUs, or when vLLM uses a kernel of
its own there, as it does on CPUs with AMX.
"""

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it

from slimqwen.vllm_plugin.patches.upstream import expect

_FIX = "short_convolution"


def conv1d(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *arguments: Any,
    **named: Any,
) -> torch.Tensor:
    """`torch.nn.functional.conv1d`, computed in float32.

    Args:
        input: [batch, channels, tokens], of any floating dtype.
        weight: [channels, channels / groups, width].
        bias: [channels].

    Returns:
        [batch, channels, tokens out], of input's dtype.
    """
    added = None if bias is None else bias.float()
    return F.conv1d(input.float(), weight.float(), added, *arguments, **named).to(input.dtype)


class _Functional(ModuleType):
    """torch.nn.functional with the `conv1d` of this module, for modules that call it F."""

    conv1d = staticmethod(conv1d)

    def __getattr__(self, name: str) -> Any:
        return getattr(F, name)


def is_needed() -> bool:
    """Whether torch convolves bfloat16 without oneDNN on this CPU."""
    return not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def install() -> bool:
    """Make vLLM's CPU kernels of Gated DeltaNet use `conv1d` of this module.

    Returns:
        False if it is installed already in this process.
    """
    from vllm.model_executor.layers.mamba.ops.cpu import causal_conv1d, gdn_attention

    functionals = [getattr(module, "F", None) for module in (causal_conv1d, gdn_attention)]
    if all(isinstance(each, _Functional) for each in functionals):
        return False
    for module in (causal_conv1d, gdn_attention):
        expect(
            _FIX, getattr(module, "F", None) is F, f"{module.__name__} does not call torch.nn.functional F"
        )
    causal_conv1d.F = gdn_attention.F = _Functional(_FIX)
    return True
