from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slimqwen.evals.engine.modes import compare
from slimqwen.evals.engine.scenarios import Request, replay
from slimqwen.serving.in_process import engine
from slimqwen.vllm_plugin.engine_fixes import short_drafts

WIDTH, K = 4, 4
CONTEXT = 64
NEAR_TIE_NATS = 0.1
"""As in eval/engine/tinyworld.yaml."""


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


@pytest.mark.engine
def test_with_mtp_requests_run_to_the_end_of_their_context_with_the_same_tokens(tiny_with_mrope, tiny, texts):
    """Without the fix the engine dies on the way. Fewer than K drafts come only in the last few steps."""
    requests = [Request(ids[: 24 + number], CONTEXT - 24 - number) for number, ids in enumerate(texts)]
    answers = {}
    for drafts, folder in ((0, tiny), (K, tiny_with_mrope)):
        with engine(folder, num_speculative_tokens=drafts, max_model_len=CONTEXT, max_num_seqs=4) as llm:
            answers[drafts] = replay(llm, requests, log_probabilities=not drafts)
    comparisons = [
        compare(plain, speculated.tokens, NEAR_TIE_NATS)
        for plain, speculated in zip(answers[0], answers[K], strict=True)
    ]
    for request, speculated, comparison in zip(requests, answers[K], comparisons, strict=True):
        assert len(speculated.tokens) == request.output_tokens
        assert comparison.near_tie or not comparison.differs, comparison
    assert sum(not comparison.differs for comparison in comparisons) >= len(requests) / 2


def two_sequences(lengths):
    """What the function is called with for sequences of 4 channels, as far as the convolution is concerned."""
    starts = torch.tensor([0, lengths[0], sum(lengths)])
    metadata = SimpleNamespace(
        num_spec_decodes=2,
        spec_query_start_loc=starts,
        spec_state_indices_tensor=torch.tensor([[0] * (K + 1), [1] * (K + 1)]),
        num_accepted_tokens=torch.tensor([3, 3]),
    )
    layer = SimpleNamespace(conv1d=SimpleNamespace(bias=None), activation="silu")
    tokens = torch.randn(sum(lengths), 4)
    return layer, metadata, tokens, None, None, torch.randn(2, 4, WIDTH - 1 + K), None, WIDTH, WIDTH - 1 + K


@pytest.fixture
def upstream(monkeypatch):
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    monkeypatch.setattr(gdn_attention, "_unpacked_conv_weight", lambda layer: torch.ones(4, WIDTH))
    return gdn_attention


@pytest.mark.usefixtures("stock_vllm")
@pytest.mark.skipif(torch.cpu._is_amx_tile_supported(), reason="equal lengths take the native kernel here")
def test_the_fix_is_still_needed(upstream):
    """Fails when vLLM rolls its buffer right: the fix can go then."""
    with pytest.raises(RuntimeError, match="must match the size"):
        upstream._spec_forward(*two_sequences((2, 2)))


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
