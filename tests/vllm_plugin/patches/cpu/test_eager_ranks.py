import pytest
import torch

from slimqwen.vllm_plugin.patches.cpu import eager_ranks
from slimqwen.vllm_plugin.patches.upstream import PatchError

LOGPROBS = torch.tensor([[-1.0, -2.0, -2.0, -0.5], [-3.0, -0.1, -4.0, -5.0]])
VALUES = torch.tensor([[-2.0], [-0.1]])


@pytest.mark.usefixtures("stock_vllm")
def test_ranks_are_counted_without_a_compiler(monkeypatch):
    from vllm.v1.sample import sampler

    assert eager_ranks.install()
    monkeypatch.setattr("torch._dynamo.eval_frame.OptimizeContext.__call__", pytest.fail)
    assert sampler.batched_count_greater_than(LOGPROBS, VALUES).tolist() == [4, 1]


@pytest.mark.usefixtures("stock_vllm")
def test_without_it_torch_compiles_them():
    """What the fix is for: once this fails, vLLM counts them by torch's own operators."""
    from vllm.v1.sample import sampler

    compiled = sampler.batched_count_greater_than
    assert compiled._torchdynamo_orig_callable(LOGPROBS, VALUES).tolist() == [4, 1]


@pytest.mark.usefixtures("stock_vllm")
def test_another_function_is_refused(monkeypatch):
    monkeypatch.setattr("vllm.v1.sample.sampler.batched_count_greater_than", lambda x, values: x)
    with pytest.raises(PatchError, match="eager_ranks"):
        eager_ranks.install()
