"""Linears of 4 and of 8 bits on torch's own products: the kernels, and their place among vLLM's."""

import itertools
from collections import namedtuple

import pytest
import torch
from compressed_tensors.compressors import pack_to_int32
from torch._subclasses.fake_tensor import FakeTensorMode

from slimqwen.vllm_plugin.patches.cpu import w4a16_linear, w8a16_linear
from slimqwen.vllm_plugin.patches.upstream import PatchError
from tests.vllm_plugin.patches.cpu.packing import packed

TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 2e-6}
"""Rounding of the result, and with zero points of an offset of at most 8 scales, to the activations' dtype."""

Linear = namedtuple("Linear", "kernel layer matrix")
"""A kernel, a layer that it has processed, and the float32 matrix [outputs, inputs] that the layer stands for."""


def layer_config(
    bits,
    inputs=256,
    outputs=64,
    group=None,
    symmetric=True,
    dtype=torch.bfloat16,
    weight_type=None,
    **changes,
):
    from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearLayerConfig
    from vllm.scalar_type import scalar_types

    known = {(4, True): "uint4b8", (4, False): "uint4", (8, True): "uint8b128"}
    fields = {
        "full_weight_shape": (inputs, outputs),
        "partition_weight_shape": (inputs, outputs),
        "weight_type": getattr(scalar_types, weight_type or known[bits, symmetric]),
        "act_type": dtype,
        "group_size": group or {4: 32, 8: -1}[bits],
        "zero_points": not symmetric,
    }
    return MPLinearLayerConfig(**fields | changes)


def kernel_class(bits):
    from slimqwen.vllm_plugin.patches.cpu.w4a16_linear import TorchInt4LinearKernel
    from slimqwen.vllm_plugin.patches.cpu.w8a16_linear import TorchInt8LinearKernel

    return {4: TorchInt4LinearKernel, 8: TorchInt8LinearKernel}[bits]


def parameter(data, **dimensions):
    made = torch.nn.Parameter(data, requires_grad=False)
    for name, dim in dimensions.items():
        setattr(made, name, dim)
    return made


def layer_of_4_bits(config, layout):
    inputs, outputs = config.partition_weight_shape
    group = inputs if config.group_size == -1 else config.group_size
    values = torch.randint(0, 16, (outputs, inputs))
    scales = (torch.rand(outputs, inputs // group) * 0.02 + 0.002).to(config.act_type)
    zeros = torch.randint(0, 16, scales.shape) if config.zero_points else torch.full(scales.shape, 8)
    matrix = (values - zeros.repeat_interleave(group, 1)) * scales.float().repeat_interleave(group, 1)
    layer = torch.nn.Module()
    if layout == "compressed-tensors":
        layer.q = parameter(packed(values, 1), output_dim=0, input_dim=1, packed_dim=1)
        layer.s = parameter(scales, output_dim=0, input_dim=1)
        zero = parameter(packed(zeros, 0), output_dim=0, input_dim=1, packed_dim=0)
    else:  # GPTQ's, which AutoAWQ checkpoints are brought to
        layer.q = parameter(packed(values.t(), 0), output_dim=1, input_dim=0, packed_dim=0)
        layer.s = parameter(scales.t().contiguous(), output_dim=1, input_dim=0)
        zero = parameter(packed(zeros.t(), 1), output_dim=1, input_dim=0, packed_dim=1)
    if config.zero_points:
        layer.z = zero
    return layer, matrix


def layer_of_8_bits(config):
    inputs, outputs = config.partition_weight_shape
    integers = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
    scales = (torch.rand(outputs, 1) * 0.002 + 0.0002).to(config.act_type)
    layer = torch.nn.Module()
    layer.q = parameter(pack_to_int32(integers, 8), output_dim=0, input_dim=1, packed_dim=1)
    layer.s = parameter(scales)
    return layer, integers * scales.float()


def linear(bits, *, layout="compressed-tensors", **config):
    config = layer_config(bits, **config)
    layer, matrix = layer_of_4_bits(config, layout) if bits == 4 else layer_of_8_bits(config)
    kernel = kernel_class(bits)(config, "q", "s", "z" if bits == 4 else None)
    kernel.process_weights_after_loading(layer)
    return Linear(kernel, layer, matrix)


def check_product(made, dtype):
    outputs, inputs = made.matrix.shape
    for rows in ((), (1,), (7,), (2, 65)):
        x = torch.randn(*rows, inputs).to(dtype)
        bias = torch.randn(outputs).to(dtype)
        expected = x.float() @ made.matrix.t()
        result = made.kernel.apply_weights(made.layer, x)
        assert (result.dtype, result.shape) == (dtype, expected.shape)
        assert (result.float() - expected).norm() <= TOLERANCE[dtype] * expected.norm()
        assert torch.equal(made.kernel.apply_weights(made.layer, x, bias), result + bias)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("layout", ["compressed-tensors", "gptq"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 64, 128, 256, -1])
def test_a_product_of_4_bits_is_that_of_the_dequantised_matrix(dtype, layout, symmetric, group):
    torch.manual_seed(0)
    for outputs in (16, 48, 528):
        form = {"outputs": outputs, "group": group, "symmetric": symmetric, "dtype": dtype}
        check_product(linear(4, layout=layout, **form), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("inputs", [16, 192, 512])
def test_a_product_of_8_bits_is_that_of_the_dequantised_matrix(dtype, inputs):
    torch.manual_seed(0)
    for outputs in (16, 24, 528):
        check_product(linear(8, inputs=inputs, outputs=outputs, dtype=dtype), dtype)


@pytest.mark.parametrize("has_instructions", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_few_rows_many_rows_and_compiled_code_take_the_same_product_of_8_bits(
    monkeypatch, dtype, has_instructions
):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_instructions)
    torch.manual_seed(0)
    kernel, layer, _ = linear(8, dtype=dtype)
    rows = torch.randn(300, 256).to(dtype)
    many = kernel.apply_weights(layer, rows)
    few = torch.cat([kernel.apply_weights(layer, part) for part in rows.split(20)])
    assert (many.float() - few.float()).norm() <= TOLERANCE[dtype] * few.float().norm()
    assert torch.equal(many, few) == (not has_instructions or dtype != torch.bfloat16)
    compiled = torch.compile(lambda x: kernel.apply_weights(layer, x), dynamic=True, fullgraph=True)
    for part in (rows[:2], rows[:20], rows):
        assert torch.equal(compiled(part), kernel.apply_weights(layer, part))


def test_a_processed_layer_keeps_only_the_packed_weights():
    _, layer, _ = linear(4, symmetric=False)
    sizes = {name: held.nbytes for name, held in layer.named_parameters()}
    assert sizes == {"q": 256 * 64 // 2, "s": 2 * 2 * 64 * 256 // 32}
    assert layer.z is None
    _, layer, _ = linear(8)
    assert {name: held.nbytes for name, held in layer.named_parameters()} == {"q": 256 * 64, "s": 2 * 64}


def test_activations_need_not_be_contiguous():
    kernel, layer, _ = linear(4, inputs=64, outputs=16)
    part = torch.randn(5, 128).to(torch.bfloat16)[:, 64:]
    assert torch.equal(kernel.apply_weights(layer, part), kernel.apply_weights(layer, part.clone()))


@pytest.mark.parametrize(("symmetric", "group"), itertools.product((True, False), (32, 64, 128)))
@pytest.mark.parametrize("outputs", [16, 1040])
def test_can_implement_the_layers_of_the_family(symmetric, group, outputs):
    config = layer_config(4, inputs=512, outputs=outputs, group=group, symmetric=symmetric)
    assert kernel_class(4).can_implement(config) == (True, None)


@pytest.mark.parametrize(
    ("bits", "changes", "why"),
    [
        (4, {"outputs": 24}, "24 outputs are not a multiple of 16"),
        (4, {"group": 16}, "the group size is 16, not one of 32, 64, 128, 256"),
        (4, {"inputs": 320, "group": -1}, "the group size is 320, not one of 32, 64, 128, 256"),
        (4, {"inputs": 96, "group": 64}, "96 inputs are not a multiple of the group size 64"),
        (4, {"dtype": torch.float64}, "activations are torch.float64, not bfloat16, float16 or float32"),
        (4, {"zero_points": True}, "weights are uint4b8 with zero points"),
        (4, {"symmetric": False, "zero_points": False}, "weights are uint4 without zero points"),
        (4, {"weight_type": "uint8b128"}, "weights are uint8b128, not uint4b8 or uint4"),
        (8, {"group": 32}, "the group size is 32, not one scale per row"),
        (8, {"inputs": 40}, "40 inputs are not a multiple of 16"),
        (8, {"dtype": torch.float64}, "activations are torch.float64, not bfloat16, float16 or float32"),
        (8, {"zero_points": True}, "weights have zero points"),
    ],
)
def test_can_implement_says_why_not(bits, changes, why):
    assert kernel_class(bits).can_implement(layer_config(bits, **changes)) == (False, why)


@pytest.mark.usefixtures("stock_vllm")
def test_vllm_chooses_the_kernel_of_4_bits_and_refuses_what_it_cannot_serve_with_the_reason():
    from vllm.model_executor.kernels.linear import choose_mp_linear_kernel

    assert w4a16_linear.install()
    assert choose_mp_linear_kernel(layer_config(4)) is kernel_class(4)
    with pytest.raises(
        ValueError, match="TorchInt4LinearKernel cannot implement due to: the group size is 16"
    ):
        choose_mp_linear_kernel(layer_config(4, group=16))


@pytest.mark.usefixtures("stock_vllm")
def test_vllm_has_no_kernel_of_8_bits_and_chooses_this_one():
    """Fails when vLLM serves W8A16 on a CPU itself: the fix can go then."""
    from vllm.model_executor.kernels.linear import choose_mp_linear_kernel

    with pytest.raises(ValueError, match="uint8b128"):
        choose_mp_linear_kernel(layer_config(8))
    assert w8a16_linear.install()
    assert choose_mp_linear_kernel(layer_config(8)) is kernel_class(8)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_products_shape_is_known_without_running_it(bits):
    """What torch.compile asks when a variant is baked."""
    kernel, layer, _ = linear(bits)
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(3, 256, dtype=torch.bfloat16)
        assert kernel.apply_weights(layer, x).shape == (3, 64)


def test_a_library_with_the_product_needs_no_kernel_of_4_bits(monkeypatch):
    from vllm import _custom_ops  # noqa: F401 - loads the library for this CPU

    monkeypatch.setattr(torch.ops._C, "cpu_gemm_wna16", "there", raising=False)
    assert not w4a16_linear.is_needed()
    monkeypatch.setattr(torch.ops, "_C", object())
    assert w4a16_linear.is_needed()


@pytest.mark.skipif(torch.cpu._is_avx512_supported(), reason="vLLM loads its AVX-512 library here")
def test_the_kernel_of_4_bits_is_still_needed():
    """Fails when vLLM's AVX2 library has the product: the fix can go then."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    assert not hasattr(torch.ops._C, "cpu_gemm_wna16")


@pytest.mark.usefixtures("stock_vllm")
def test_install_refuses_when_vllms_kernel_is_not_in_the_list(monkeypatch):
    from vllm.model_executor.kernels import linear
    from vllm.platforms.interface import PlatformEnum

    monkeypatch.setitem(linear._POSSIBLE_KERNELS, PlatformEnum.CPU, [])
    with pytest.raises(PatchError, match="do not include CPUWNA16LinearKernel"):
        w4a16_linear.install()


@pytest.mark.usefixtures("stock_vllm")
@pytest.mark.parametrize("fix", [w4a16_linear, w8a16_linear])
def test_install_refuses_when_a_kernel_must_have_another_method(monkeypatch, fix):
    from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel

    methods = MPLinearKernel.__abstractmethods__ | {"warm_up"}
    monkeypatch.setattr(MPLinearKernel, "__abstractmethods__", methods)
    with pytest.raises(PatchError, match=r"must now have .*warm_up"):
        fix.install()
