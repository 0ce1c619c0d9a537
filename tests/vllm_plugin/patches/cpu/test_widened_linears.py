import pytest
import torch

from slimqwen.vllm_plugin.patches.cpu import widened_linears

needs_fix = pytest.mark.skipif(
    torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN takes bfloat16 on this CPU"
)


@pytest.fixture
def operations(stock_vllm):
    """vLLM's operations with the fix in place."""
    from vllm import _custom_ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    assert widened_linears.install()
    assert not widened_linears.install()
    return _custom_ops


@needs_fix
@pytest.mark.usefixtures("stock_vllm")
def test_onednn_still_refuses_16_bits():
    """Fails when it no longer does, and the fix can go."""
    from vllm import _custom_ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    with pytest.raises(RuntimeError, match="matmul primitive"):
        _custom_ops.create_onednn_mm(torch.ones(32, 64, dtype=torch.bfloat16).t(), 32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 5, 300])
@pytest.mark.parametrize("with_bias", [True, False])
def test_the_product_is_that_of_float32_in_the_dtype_of_the_inputs(operations, dtype, rows, with_bias):
    chance = torch.Generator().manual_seed(rows)
    weight = torch.randn(48, 64, generator=chance).to(dtype)
    inputs = torch.randn(2, rows, 64, generator=chance).to(dtype)
    bias = torch.randn(48, generator=chance).to(dtype) if with_bias else None
    product = operations.onednn_mm(operations.create_onednn_mm(weight.t(), 32), inputs, bias)
    exact = inputs.double() @ weight.double().t() + (bias.double() if with_bias else 0)
    assert (product.dtype, product.shape) == (dtype, (2, rows, 48))
    # One rounding to the dtype, and that of a sum of 64 terms in float32.
    assert torch.allclose(product.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 5])
def test_one_compiled_graph_multiplies_one_row_and_several(operations, rows):
    handler = operations.create_onednn_mm(torch.ones(48, 64, dtype=torch.bfloat16).t(), 32)
    multiply = torch.compile(
        lambda inputs: operations.onednn_mm(handler, inputs, None), backend="eager", dynamic=True
    )
    assert torch.equal(
        multiply(torch.ones(rows, 64, dtype=torch.bfloat16)), torch.full((rows, 48), 64.0).bfloat16()
    )


@pytest.mark.parametrize(
    ("instructions", "onednn_takes_them", "stored", "of_many_rows"),
    [(True, True, 2, 2), (False, True, 6, 4), (False, False, 4, 4)],
)
def test_a_weight_takes_the_bytes_of_each_form_that_is_kept(
    monkeypatch, instructions, onednn_takes_them, stored, of_many_rows
):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_avx2_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: instructions)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednn_takes_them)
    assert widened_linears.weight_bytes(torch.bfloat16) == stored
    assert widened_linears.weight_bytes(torch.bfloat16, single_rows=False) == of_many_rows
    assert widened_linears.weight_bytes(torch.float32) == 4
