import itertools

import pytest
import torch

from slimqwen.vllm_plugin.engine_fixes import w8a16_linear
from slimqwen.vllm_plugin.engine_fixes.upstream import EngineFixError


def layer_config(inputs=256, outputs=64, group=-1, dtype=torch.bfloat16, **changes):
    from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearLayerConfig
    from vllm.scalar_type import scalar_types

    fields = {
        "full_weight_shape": (inputs, outputs),
        "partition_weight_shape": (inputs, outputs),
        "weight_type": scalar_types.uint8b128,
        "act_type": dtype,
        "group_size": group,
        "zero_points": False,
    }
    return MPLinearLayerConfig(**fields | changes)


def kernel_class():
    from slimqwen.vllm_plugin.engine_fixes.torch_int8 import TorchInt8LinearKernel

    return TorchInt8LinearKernel


def quantised_layer(config):
    """A layer as vLLM loads it, and the float32 matrix [outputs, inputs] that it stands for."""
    from compressed_tensors.compressors import pack_to_int32

    inputs, outputs = config.partition_weight_shape
    integers = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
    scales = (torch.rand(outputs, 1) * 0.002 + 0.0002).to(config.act_type)
    layer = torch.nn.Module()
    layer.q = torch.nn.Parameter(pack_to_int32(integers, 8), requires_grad=False)
    layer.q.output_dim, layer.q.input_dim, layer.q.packed_dim = 0, 1, 1
    layer.s = torch.nn.Parameter(scales, requires_grad=False)
    return layer, integers * scales.float()


# Rounding of the result to the activations' dtype.
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 2e-6}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("inputs", [16, 192, 512])
def test_product_is_that_of_the_dequantised_matrix(dtype, inputs):
    torch.manual_seed(0)
    for outputs, rows in itertools.product((16, 24, 528), ((), (1,), (7,), (2, 65))):
        config = layer_config(inputs, outputs, dtype=dtype)
        layer, matrix = quantised_layer(config)
        kernel = kernel_class()(config, "q", "s")
        kernel.process_weights_after_loading(layer)
        x = torch.randn(*rows, inputs).to(dtype)
        bias = torch.randn(outputs).to(dtype)
        expected = x.float() @ matrix.t()
        result = kernel.apply_weights(layer, x)
        assert (result.dtype, result.shape) == (dtype, expected.shape)
        assert (result.float() - expected).norm() <= TOLERANCE[dtype] * expected.norm()
        assert torch.equal(kernel.apply_weights(layer, x, bias), result + bias)


@pytest.mark.parametrize("has_instructions", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_few_rows_many_rows_and_compiled_code_take_the_same_product(monkeypatch, dtype, has_instructions):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_instructions)
    torch.manual_seed(0)
    config = layer_config(dtype=dtype)
    layer, _ = quantised_layer(config)
    kernel = kernel_class()(config, "q", "s")
    kernel.process_weights_after_loading(layer)
    rows = torch.randn(300, 256).to(dtype)
    many = kernel.apply_weights(layer, rows)
    few = torch.cat([kernel.apply_weights(layer, part) for part in rows.split(20)])
    assert (many.float() - few.float()).norm() <= TOLERANCE[dtype] * few.float().norm()
    assert torch.equal(many, few) == (not has_instructions or dtype != torch.bfloat16)
    compiled = torch.compile(lambda x: kernel.apply_weights(layer, x), dynamic=True, fullgraph=True)
    for part in (rows[:2], rows[:20], rows):
        assert torch.equal(compiled(part), kernel.apply_weights(layer, part))


def test_a_processed_layer_keeps_a_byte_a_weight():
    layer, _ = quantised_layer(layer_config())
    kernel_class()(layer_config(), "q", "s").process_weights_after_loading(layer)
    assert {name: held.nbytes for name, held in layer.named_parameters()} == {"q": 256 * 64, "s": 2 * 64}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"group": 32}, "the group size is 32, not one scale per row"),
        ({"inputs": 40}, "40 inputs are not a multiple of 16"),
        ({"dtype": torch.float64}, "activations are torch.float64, not bfloat16, float16 or float32"),
        ({"zero_points": True}, "weights have zero points"),
    ],
)
def test_can_implement_says_why_not(changes, why):
    assert kernel_class().can_implement(layer_config(**changes)) == (False, why)


@pytest.mark.usefixtures("stock_vllm")
def test_vllm_has_no_kernel_of_its_own_and_chooses_this_one():
    """Fails when vLLM serves W8A16 on a CPU itself: the fix can go then."""
    from vllm.model_executor.kernels.linear import choose_mp_linear_kernel

    with pytest.raises(ValueError, match="uint8b128"):
        choose_mp_linear_kernel(layer_config())
    assert w8a16_linear.install()
    assert choose_mp_linear_kernel(layer_config()) is kernel_class()


def test_the_products_shape_is_known_without_running_it():
    """What torch.compile asks when a variant is baked."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    layer, _ = quantised_layer(layer_config())
    kernel = kernel_class()(layer_config(), "q", "s")
    kernel.process_weights_after_loading(layer)
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(3, 256, dtype=torch.bfloat16)
        assert kernel.apply_weights(layer, x).shape == (3, 64)


@pytest.mark.usefixtures("stock_vllm")
def test_install_refuses_when_a_kernel_must_have_another_method(monkeypatch):
    from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel

    methods = MPLinearKernel.__abstractmethods__ | {"warm_up"}
    monkeypatch.setattr(MPLinearKernel, "__abstractmethods__", methods)
    with pytest.raises(EngineFixError, match=r"must now have .*warm_up"):
        w8a16_linear.install()
