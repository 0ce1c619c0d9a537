import pytest
import torch

from slimqwen.serving import in_process
from slimqwen.vllm_plugin.engine_fixes import lone_sequence

OUTPUT_TOKENS = 8


@pytest.mark.usefixtures("stock_vllm")
def test_a_single_index_gets_the_stride_of_its_own_and_more_are_left_as_they_are(monkeypatch):
    from vllm import _custom_ops

    strides = []

    def update(
        A_log, dt_bias, q, k, v, a, b, initial_state_source, initial_state_indices, cu_seqlens,  # noqa: N803
        use_qk_l2norm_in_kernel, softplus_beta=1.0, softplus_threshold=20.0,
    ):  # fmt: skip
        strides.append((initial_state_indices.tolist(), initial_state_indices.stride()))

    monkeypatch.setattr(_custom_ops, lone_sequence._KERNEL, update)
    assert lone_sequence.install()
    table = torch.arange(10, dtype=torch.int32).reshape(2, 5)
    others = dict.fromkeys(
        ("A_log", "dt_bias", "q", "k", "v", "a", "b", "initial_state_source", "cu_seqlens")
    )
    for indices in (table[1:, 0], table[:, 0]):
        _custom_ops.fused_sigmoid_gating_delta_rule_update_cpu(
            **others, initial_state_indices=indices, use_qk_l2norm_in_kernel=True
        )
    assert strides == [([5], (1,)), ([0, 5], (5,))]


@pytest.mark.engine
def test_a_prompt_of_one_token_more_than_a_step_takes_is_answered_beside_drafts(tiny, texts):
    """Without the fix the engine dies. Lengths around it show that nothing else depends on the last part."""
    from vllm import SamplingParams

    budget = 64
    document = [token for ids in texts for token in ids]
    prompts = [{"prompt_token_ids": document[:length]} for length in (1, budget, budget + 1, budget + 2)]
    settings = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    answers = []
    for drafts in (0, 4):
        with in_process.engine(
            tiny, num_speculative_tokens=drafts, max_num_seqs=1, max_num_batched_tokens=budget
        ) as llm:
            answers.append(
                [list(each.outputs[0].token_ids) for each in llm.generate(prompts, settings, use_tqdm=False)]
            )
    assert answers[0] == answers[1]
