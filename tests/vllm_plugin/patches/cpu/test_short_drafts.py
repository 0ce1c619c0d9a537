"""That requests go on to the end of their context is seen in tests/evals/test_engine_process.py."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slimqwen.vllm_plugin.patches.cpu import short_drafts

WIDTH, K = 4, 4


@given(st.lists(st.tuples(st.integers(1, K + 1), st.integers(1, K + 1)), min_size=1, max_size=12))
def test_the_convolution_always_reads_the_tokens_that_stayed(steps):
    """Against a history kept whole: each step some tokens come, of which at least one stays."""
    row = torch.full((1, WIDTH - 1 + K), float("nan"))
    stayed = [-3.0, -2.0, -1.0]
    row[0, : WIDTH - 1] = torch.tensor(stayed)
    accepted, number = 1, 0.0
    for length, asked in steps:
        new = torch.arange(number, number + length).unsqueeze(0)
        number += 100
        read = short_drafts.roll(row, new, accepted, WIDTH)
        assert read[0].tolist() == stayed[1 - WIDTH :] + new[0].tolist()
        accepted = min(asked, length)
        stayed += new[0, :accepted].tolist()


def two_sequences(lengths):
    """What the function is called with for sequences of 4 channels, as far as the convolution is concerned."""
    starts = torch.tensor([0, lengths[0], sum(lengths)])
    metadata = SimpleNamespace(
        num_spec_decodes=2,
        spec_query_start_loc=starts,
        spec_state_indices_tensor=torch.tensor([[0] * (K + 1), [1] * (K + 1)]),
        num_accepted_tokens=torch.tensor([3, 3]),
    )
    layer = SimpleNamespace(
        conv1d=SimpleNamespace(bias=None, weight=None),
        activation=None,
        rearrange_mixed_qkv=lambda tokens: (tokens, tokens, tokens),
        A_log=None,
        dt_bias=None,
    )
    chance = torch.Generator().manual_seed(0)
    tokens = torch.randn(sum(lengths), 4, generator=chance)
    rows = torch.randn(2, 4, WIDTH - 1 + K, generator=chance)
    return layer, metadata, tokens, None, None, rows, None, WIDTH, WIDTH - 1 + K


@pytest.fixture
def upstream(monkeypatch):
    """vLLM's module, whose recurrence gives back what was convolved."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    kernels = SimpleNamespace(
        fused_sigmoid_gating_delta_rule_update_spec_cpu=lambda *, q, **others: q,
        causal_conv1d_update_cpu=gdn_attention.ops.causal_conv1d_update_cpu,
        causal_conv1d_weight_pack=gdn_attention.ops.causal_conv1d_weight_pack,
    )
    monkeypatch.setattr(gdn_attention, "ops", kernels)
    monkeypatch.setattr(gdn_attention, "_unpacked_conv_weight", lambda layer: torch.ones(4, WIDTH))
    return gdn_attention


@pytest.mark.usefixtures("stock_vllm")
def test_the_fix_is_still_needed_where_torch_convolves(upstream):
    """Fails when vLLM rolls its buffer right. The fix can go when the test of the native kernel fails too."""
    with pytest.raises(RuntimeError, match="must match the size"):
        upstream._spec_forward(*two_sequences((2, 1)))


@pytest.mark.usefixtures("stock_vllm")
@pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(), reason="vLLM's library has no such kernel here"
)
def test_the_fix_is_still_needed_where_a_native_kernel_convolves(upstream, monkeypatch):
    """Fails when the kernel takes fewer tokens than were accepted before."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    layer, metadata, tokens, b, a, _, state, *sizes = two_sequences((2, 2))
    channels = 64
    layer.conv1d.weight = upstream.ops.causal_conv1d_weight_pack(torch.ones(channels, WIDTH).bfloat16())
    tokens = tokens.repeat(1, channels // 4).bfloat16()
    rows = torch.zeros(2, WIDTH - 1 + K, channels).bfloat16().transpose(1, 2)
    with pytest.raises(RuntimeError, match=r"num_accepted_tokens must be in \[1, seqlen\]"):
        upstream._spec_forward(layer, metadata, tokens, b, a, rows, state, *sizes)


@pytest.mark.usefixtures("stock_vllm")
@pytest.mark.parametrize("has_native_kernel", [True, False])
@pytest.mark.parametrize("lengths", [(2, 2), (2, 1), (K + 1, 2), (K, K)])
def test_steps_with_fewer_drafts_never_reach_vllm(upstream, monkeypatch, lengths, has_native_kernel):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_native_kernel)
    stock = upstream._spec_forward
    monkeypatch.setattr(upstream, "_spec_forward", stock)
    assert short_drafts.install()
    arguments = two_sequences(lengths)
    _, _, tokens, _, _, rows, *_ = arguments
    histories = rows[:, :, 2 : 2 + WIDTH - 1].clone()  # three tokens were accepted
    convolved = upstream._spec_forward(*arguments)
    each = zip(histories, tokens.split(lengths), convolved.split(lengths), strict=True)
    for row, (history, new, found) in zip(rows, each, strict=True):
        read = torch.cat([history, new.T], dim=1)
        torch.testing.assert_close(found.T, read.unfold(1, WIDTH, 1).sum(-1))
        assert torch.equal(row[:, : WIDTH - 2 + len(new)], read[:, 1:])


@pytest.mark.usefixtures("stock_vllm")
def test_steps_with_k_drafts_each_are_left_to_vllm(upstream, monkeypatch):
    seen = []

    def stock(layer, attn_metadata_i, mixed_qkv_spec, b_spec, a_spec, conv_buf, ssm_state, width, state_len):
        seen.append(len(mixed_qkv_spec))
        return "by vLLM"

    monkeypatch.setattr(upstream, "_spec_forward", stock)
    assert short_drafts.install()
    assert upstream._spec_forward(*two_sequences((K + 1, K + 1))) == "by vLLM"
    assert seen == [2 * (K + 1)]
