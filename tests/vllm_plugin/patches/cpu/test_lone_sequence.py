"""That no prompt length ends an engine is seen in tests/evals/test_engine_process.py."""

import pytest
import torch

from slimqwen.vllm_plugin.patches.cpu import lone_sequence


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
