import pytest
import torch
from compressed_tensors.compressors import pack_to_int32

from slimqwen.checkpoint.rtn import quantise
from slimqwen.vllm_plugin.patches.cpu import embedding_lookup


@pytest.fixture
def lookup(stock_vllm):
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors_embedding

    return compressed_tensors_embedding


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("group", [32, 192])
def test_rows_are_integers_times_scales_in_the_order_of_the_tokens(lookup, bits, group):
    assert embedding_lookup.install()
    table = torch.randn(50, 192, generator=torch.Generator().manual_seed(1))
    integers, scales = quantise(table, group, bits)
    ids = torch.tensor([7, 0, 49, 7])
    found = lookup._dequant_gather_triton(ids, pack_to_int32(integers, bits), scales, 192, bits)
    whole = (integers.float() * scales.float().repeat_interleave(group, 1)).bfloat16()
    assert torch.equal(found, whole[ids])


def test_the_kernel_is_replaced_once_and_where_triton_cannot_run(lookup, monkeypatch):
    assert embedding_lookup.is_needed()  # on a CPU
    assert embedding_lookup.install()
    assert not embedding_lookup.install()
    monkeypatch.setattr(embedding_lookup.upstream, "lacks_triton", lambda: False)
    assert not embedding_lookup.is_needed()


def test_without_the_patch_the_first_token_ends_the_engine(lookup):
    integers, scales = quantise(torch.ones(4, 64), 32, 8)
    with pytest.raises(AttributeError, match="next_power_of_2"):
        lookup._dequant_gather_triton(torch.tensor([0]), pack_to_int32(integers, 8), scales, 64, 8)
