import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it

from slimqwen.vllm_plugin.patches.cpu import lone_token

CHANNELS, WIDTH = 64, 4


@pytest.fixture
def attention(stock_vllm):
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    return gdn_attention


def ask(attention, x, states, initial, weight=None):
    """Convolve one sequence [channels, tokens] whose state is the second of `states`."""
    return attention._causal_conv1d_fwd_cpu(
        x=x,
        weight=weight,
        bias=None,
        conv_states=states,
        query_start_loc=torch.tensor([0, x.shape[1]], dtype=torch.int32),
        cache_indices=torch.tensor([1], dtype=torch.int32),
        has_initial_state=torch.tensor([initial]),
        silu_activation=True,
        is_weight_packed=True,
    )


@pytest.mark.parametrize("stride", [1, CHANNELS, CHANNELS + 8])
def test_a_lone_token_has_the_stride_of_its_channels_and_more_are_left_as_they_are(
    attention, monkeypatch, stride
):
    given = []

    def forward(
        *, x, weight, bias, conv_states, query_start_loc, cache_indices, has_initial_state,
        silu_activation, is_weight_packed,
    ):  # fmt: skip
        given.append(x)
        return x

    monkeypatch.setattr(attention, "_causal_conv1d_fwd_cpu", forward)
    assert lone_token.install()
    values = torch.arange(2.0 * stride + CHANNELS)
    states = torch.zeros(3, CHANNELS, WIDTH - 1)
    for tokens in (1, 2):
        asked = values.as_strided((CHANNELS, tokens), (1, stride))
        ask(attention, asked, states, False)
        assert torch.equal(given[-1], asked)
    assert [x.stride() for x in given] == [(1, CHANNELS), (1, stride)]


@pytest.mark.skipif(not torch.cpu._is_avx512_bf16_supported(), reason="vLLM convolves by torch here")
@pytest.mark.parametrize("initial", [True, False])
def test_one_token_is_convolved_as_torch_does_in_float32(attention, monkeypatch, initial):
    from vllm import _custom_ops as ops

    monkeypatch.setattr(attention, "_causal_conv1d_fwd_cpu", attention._causal_conv1d_fwd_cpu)
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(CHANNELS, WIDTH, generator=draw).bfloat16()
    # Channels lie together, as in vLLM's cache.
    states = torch.randn(3, WIDTH - 1, CHANNELS, generator=draw).bfloat16().transpose(1, 2)
    x = torch.randn(1, CHANNELS, generator=draw).bfloat16()
    packed = ops.causal_conv1d_weight_pack(weight)
    x = x.as_strided((CHANNELS, 1), (1, 1))
    with pytest.raises(RuntimeError, match="expect x to be transposed"):
        ask(attention, x, states.clone(), initial, packed)
    assert lone_token.install()
    past = states[1].float() * initial
    history = torch.cat([past, x.float()], dim=1)
    expected = F.silu((history * weight.float()).sum(1))
    found = ask(attention, x, states, initial, packed)
    epsilon = 2 * torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(found[:, 0].float(), expected, rtol=epsilon, atol=epsilon)
    assert torch.equal(states[1].float(), history[:, 1:])
