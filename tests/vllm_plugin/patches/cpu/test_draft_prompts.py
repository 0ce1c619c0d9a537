"""Attention of an MTP head from the last tokens of a prompt alone."""

import pytest
import torch

from slimqwen.serving.in_process import engine
from slimqwen.vllm_plugin.patches.cpu import draft_prompts


def test_the_last_rows_of_each_request_are_kept():
    rows, starts = draft_prompts.last_rows(torch.tensor([0, 100, 103, 110], dtype=torch.int32), 5)
    assert rows.tolist() == [95, 96, 97, 98, 99, 100, 101, 102, 105, 106, 107, 108, 109]
    assert (starts.tolist(), starts.dtype) == ([0, 5, 8, 13], torch.int32)


@pytest.mark.parametrize(
    ("name", "is_head"),
    [
        ("mtp.layers.0.self_attn.attn", True),
        ("model.mtp.layers.0.self_attn.attn", True),
        ("model.layers.3.self_attn.attn", False),
    ],
)
def test_a_head_is_known_by_the_name_of_its_layer(name, is_head):
    assert bool(draft_prompts._HEAD.search(name)) == is_head


@pytest.mark.engine
def test_long_prompts_are_drafted_for_as_without_the_fix(tiny, texts, monkeypatch):
    """Whole prompts and parts of them, in one step with requests that decode."""
    from vllm import SamplingParams
    from vllm.v1.attention.backends import cpu_attn

    ids = [token for text in texts for token in text]
    prompts = [
        {"prompt_token_ids": ids[start : start + length]} for start, length in enumerate((20, 65, 300, 700))
    ]
    shortened = []
    stock_rows = draft_prompts.last_rows
    monkeypatch.setattr(
        draft_prompts, "last_rows", lambda starts, kept: shortened.append(starts) or stock_rows(starts, kept)
    )

    def drafted(llm):
        before = counts(llm)
        greedy = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
        answers = llm.generate(prompts, greedy, use_tqdm=False)
        return [answer.outputs[0].token_ids for answer in answers], [
            now - then for now, then in zip(counts(llm), before, strict=True)
        ]

    with engine(tiny, max_model_len=1024, max_num_batched_tokens=512, num_speculative_tokens=4) as llm:
        fixed = drafted(llm)
        assert shortened
        forward = cpu_attn.CPUAttentionBackendImpl.forward
        monkeypatch.setattr(cpu_attn.CPUAttentionBackendImpl, "forward", forward.__wrapped__)
        assert drafted(llm) == fixed


def counts(llm):
    return [
        metric.value
        for metric in llm.get_metrics()
        if metric.name in ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
    ]
