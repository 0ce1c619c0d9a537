from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slimqwen.serving.in_process import engine
from slimqwen.vllm_plugin.engine_fixes import short_drafts
from slimqwen.vllm_plugin.engine_fixes.upstream import EngineFixError

WIDTH, K = 4, 4
CONTEXT = 64
NEAR_TIE = 0.1
"""Gap of the two likeliest tokens' log-probabilities below which bf16 may choose either."""


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
    from vllm import SamplingParams

    prompts = [ids[: 24 + number] for number, ids in enumerate(texts)]
    said = {}
    for drafts, folder in ((0, tiny), (K, tiny_with_mrope)):
        with engine(folder, num_speculative_tokens=drafts, max_model_len=CONTEXT, max_num_seqs=4) as llm:
            settings = [
                SamplingParams(
                    temperature=0.0,
                    max_tokens=CONTEXT - len(ids),
                    ignore_eos=True,
                    logprobs=None if drafts else 2,
                )
                for ids in prompts
            ]
            starts = [{"prompt_token_ids": ids} for ids in prompts]
            said[drafts] = [output.outputs[0] for output in llm.generate(starts, settings, use_tqdm=False)]
    same = 0
    for ids, plain, speculated in zip(prompts, said[0], said[K], strict=True):
        assert len(speculated.token_ids) == len(plain.token_ids) == CONTEXT - len(ids)
        differ = [a != b for a, b in zip(plain.token_ids, speculated.token_ids, strict=True)]
        if any(differ):
            first = plain.logprobs[differ.index(True)].values()
            best, second = sorted((each.logprob for each in first), reverse=True)[:2]
            assert best - second < NEAR_TIE
        else:
            same += 1
    assert same >= len(prompts) / 2


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


@pytest.mark.usefixtures("stock_vllm")
def test_install_changes_nothing_the_second_time(upstream):
    assert short_drafts.install()
    first = upstream._spec_forward
    assert not short_drafts.install()
    assert upstream._spec_forward is first


@pytest.mark.usefixtures("stock_vllm")
def test_install_refuses_a_function_with_other_parameters(upstream, monkeypatch):
    monkeypatch.setattr(upstream, "_spec_forward", lambda layer, metadata: None)
    with pytest.raises(EngineFixError, match=r"takes \(layer, metadata\), not \(layer, attn_metadata_i"):
        short_drafts.install()
