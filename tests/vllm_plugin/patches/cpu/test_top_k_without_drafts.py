import pytest
import torch

from slimqwen.vllm_plugin.patches.cpu import top_k_without_drafts


@pytest.fixture
def upstream(stock_vllm):
    from vllm.v1.sample.ops import topk_topp_sampler

    return topk_topp_sampler


NO_ROWS = torch.empty(0, 16), torch.empty(0, dtype=torch.int32), None


def test_the_fix_is_still_needed(upstream):
    """Fails when vLLM takes logits of no rows: the fix can go then."""
    with pytest.raises(RuntimeError, match="numel"):
        upstream.apply_top_k_top_p_pytorch(*NO_ROWS, allow_cpu_sync=True)


def test_no_rows_stay_none_and_others_are_cut_as_by_vllm(upstream):
    logits = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    k = torch.tensor([1, 16, 5], dtype=torch.int32)
    expected = upstream.apply_top_k_top_p_pytorch(logits.clone(), k, None, allow_cpu_sync=True)
    assert top_k_without_drafts.install()
    assert upstream.apply_top_k_top_p_pytorch(*NO_ROWS, allow_cpu_sync=True).shape == (0, 16)
    found = upstream.apply_top_k_top_p_pytorch(logits.clone(), k, None, allow_cpu_sync=True)
    assert torch.equal(found, expected)
    assert torch.isfinite(found).sum(1).tolist() == [1, 16, 5]
