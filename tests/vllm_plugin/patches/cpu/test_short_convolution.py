import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from slimqwen.vllm_plugin.patches.cpu import short_convolution
from slimqwen.vllm_plugin.patches.upstream import PatchError

CHANNELS, WIDTH = 24, 4


def parts(tokens, seed):
    chance = torch.Generator().manual_seed(seed)
    read = torch.randn(1, CHANNELS, tokens + WIDTH - 1, generator=chance).bfloat16()
    weight = torch.randn(CHANNELS, 1, WIDTH, generator=chance).bfloat16()
    return read, weight, torch.randn(CHANNELS, generator=chance).bfloat16()


@settings(max_examples=50)
@given(st.integers(1, 40), st.integers(0, 2**31), st.booleans())
def test_the_bits_are_those_of_bfloat16(tokens, seed, with_bias):
    read, weight, bias = parts(tokens, seed)
    bias = bias if with_bias else None
    ours = short_convolution.conv1d(read, weight, bias, padding=0, groups=CHANNELS)
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, F.conv1d(read, weight, bias, padding=0, groups=CHANNELS))


def operators(function):
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        function()
    return {event.key for event in seen.key_averages()}


@pytest.mark.skipif(not short_convolution.is_needed(), reason="oneDNN has bfloat16 here")
def test_torch_still_leaves_bfloat16_to_its_fallback():
    """Fails when torch no longer does, and the fix can go."""
    read, weight, _ = parts(5, 0)
    stock = operators(lambda: F.conv1d(read, weight, groups=CHANNELS))
    ours = operators(lambda: short_convolution.conv1d(read, weight, groups=CHANNELS))
    assert "aten::mkldnn_convolution" in ours - stock


@pytest.mark.usefixtures("stock_vllm")
def test_both_modules_convolve_by_it_and_keep_the_rest():
    from vllm.model_executor.layers.mamba.ops.cpu import causal_conv1d, gdn_attention

    assert short_convolution.install()
    for module in (causal_conv1d, gdn_attention):
        assert module.F.conv1d is short_convolution.conv1d
        assert module.F.silu is F.silu


@pytest.mark.usefixtures("stock_vllm")
def test_a_module_that_calls_it_otherwise_is_an_error(monkeypatch):
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    monkeypatch.delattr(gdn_attention, "F")
    with pytest.raises(PatchError, match=r"does not call torch\.nn\.functional F"):
        short_convolution.install()
