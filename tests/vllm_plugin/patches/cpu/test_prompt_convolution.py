"""Prompts beside drafts, convolved by vLLM's native kernel."""

import pytest
import torch

from slimqwen.vllm_plugin.patches.cpu import lone_token, prompt_convolution
from slimqwen.vllm_plugin.patches.upstream import PatchError

has_kernel = pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(), reason="vLLM has its native convolution only with bfloat16"
)
CHANNELS, WIDTH, DRAFTS = 64, 4, 4


def batch(lengths):
    """Arguments of vLLM's torch convolution for prompts of these lengths; every second one goes on with a state."""
    torch.manual_seed(0)
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return {
        "x": torch.randn(sum(lengths), CHANNELS).to(torch.bfloat16).T,
        "weight": torch.randn(CHANNELS, WIDTH).to(torch.bfloat16),
        "bias": None,
        "conv_states": torch.randn(8, WIDTH - 1 + DRAFTS, CHANNELS).to(torch.bfloat16).transpose(1, 2),
        "query_start_loc": starts,
        "cache_indices": torch.tensor([6, 1, 3][: len(lengths)], dtype=torch.int32),
        "has_initial_state": torch.tensor([False, True, False][: len(lengths)]),
        "activation": "silu",
    }


@has_kernel
@pytest.mark.usefixtures("stock_vllm")
@pytest.mark.parametrize("lengths", [(1,), (2,), (3, 1), (200,), (5, 70, 300)])
def test_a_prompt_has_the_result_and_leaves_the_state_of_torchs_convolution(lengths):
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    lone_token.install()
    wanted, found = batch(lengths), batch(lengths)
    expected = gdn_attention.causal_conv1d_torch(**wanted)
    assert prompt_convolution.install()
    assert not prompt_convolution.install()
    result = gdn_attention.causal_conv1d_torch(**found)
    torch.testing.assert_close(result, expected, atol=0.03, rtol=0.02)
    assert torch.equal(found["conv_states"], wanted["conv_states"])
    assert torch.equal(found["weight"], wanted["weight"])


@has_kernel
@pytest.mark.usefixtures("stock_vllm")
def test_what_the_kernel_does_not_know_is_left_to_torch():
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    arguments = batch((9,)) | {"weight": torch.randn(CHANNELS, 3).to(torch.bfloat16)}
    expected = gdn_attention.causal_conv1d_torch(**batch((9,)) | {"weight": arguments["weight"]})
    prompt_convolution.install()
    assert torch.equal(gdn_attention.causal_conv1d_torch(**arguments), expected)


@pytest.mark.parametrize(("has_bf16", "has_amx"), [(False, False), (True, False), (True, True)])
def test_it_is_needed_with_bfloat16_and_without_amx(monkeypatch, has_bf16, has_amx):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    assert prompt_convolution.is_needed() == (has_bf16 and not has_amx)


@pytest.mark.usefixtures("stock_vllm")
def test_install_refuses_without_the_kernel(monkeypatch):
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    monkeypatch.delattr(gdn_attention, "_causal_conv1d_fwd_cpu")
    with pytest.raises(PatchError, match="no native convolution"):
        prompt_convolution.install()
