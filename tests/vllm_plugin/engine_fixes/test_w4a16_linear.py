import itertools

import pytest
import torch

from slimqwen.vllm_plugin.engine_fixes import w4a16_linear
from slimqwen.vllm_plugin.engine_fixes.upstream import EngineFixError
from tests.vllm_plugin.engine_fixes.packing import packed


def layer_config(inputs=256, outputs=64, group=32, symmetric=True, dtype=torch.bfloat16, **changes):
    from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearLayerConfig
    from vllm.scalar_type import scalar_types

    fields = {
        "full_weight_shape": (inputs, outputs),
        "partition_weight_shape": (inputs, outputs),
        "weight_type": scalar_types.uint4b8 if symmetric else scalar_types.uint4,
        "act_type": dtype,
        "group_size": group,
        "zero_points": not symmetric,
    }
    return MPLinearLayerConfig(**fields | changes)


def kernel_class():
    from slimqwen.vllm_plugin.engine_fixes.torch_int4 import TorchInt4LinearKernel

    return TorchInt4LinearKernel


def parameter(data, **dimensions):
    made = torch.nn.Parameter(data, requires_grad=False)
    for name, dim in dimensions.items():
        setattr(made, name, dim)
    return made


def quantised_layer(config, layout):
    """A layer as vLLM loads it, and the float32 matrix [outputs, inputs] that it stands for."""
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


# Rounding of the result, and with zero points of an offset of at most 8 scales, to the activations' dtype.
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 2e-6}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("layout", ["compressed-tensors", "gptq"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 64, 128, 256, -1])
def test_product_is_that_of_the_dequantised_matrix(dtype, layout, symmetric, group):
    torch.manual_seed(0)
    for outputs, rows in itertools.product((16, 48, 528), ((), (1,), (7,), (2, 65))):
        config = layer_config(256, outputs, group, symmetric, dtype)
        layer, matrix = quantised_layer(config, layout)
        kernel = kernel_class()(config, "q", "s", "z")
        kernel.process_weights_after_loading(layer)
        x = torch.randn(*rows, 256).to(dtype)
        bias = torch.randn(outputs).to(dtype)
        expected = x.float() @ matrix.t()
        result = kernel.apply_weights(layer, x)
        assert result.dtype == dtype
        assert result.shape == expected.shape
        assert (result.float() - expected).norm() <= TOLERANCE[dtype] * expected.norm()
        assert torch.equal(kernel.apply_weights(layer, x, bias), result + bias)


def test_a_processed_layer_keeps_only_the_packed_weights():
    config = layer_config(256, 64, 32, symmetric=False)
    layer, _ = quantised_layer(config, "compressed-tensors")
    kernel_class()(config, "q", "s", "z").process_weights_after_loading(layer)
    sizes = {name: held.nbytes for name, held in layer.named_parameters()}
    assert sizes == {"q": 256 * 64 // 2, "s": 2 * 2 * 64 * 256 // 32}
    assert layer.z is None


def test_activations_need_not_be_contiguous():
    config = layer_config(64, 16)
    layer, _ = quantised_layer(config, "compressed-tensors")
    kernel = kernel_class()(config, "q", "s", "z")
    kernel.process_weights_after_loading(layer)
    wide = torch.randn(5, 128).to(torch.bfloat16)
    assert torch.equal(
        kernel.apply_weights(layer, wide[:, 64:]), kernel.apply_weights(layer, wide[:, 64:].clone())
    )


@pytest.mark.parametrize(("symmetric", "group"), itertools.product((True, False), (32, 64, 128)))
@pytest.mark.parametrize("outputs", [16, 1040])
def test_can_implement_the_layers_of_the_family(symmetric, group, outputs):
    assert kernel_class().can_implement(layer_config(512, outputs, group, symmetric)) == (True, None)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"outputs": 24}, "24 outputs are not a multiple of 16"),
        ({"group": 16}, "the group size is 16, not one of 32, 64, 128, 256"),
        ({"inputs": 320, "group": -1}, "the group size is 320, not one of 32, 64, 128, 256"),
        ({"inputs": 96, "group": 64}, "96 inputs are not a multiple of the group size 64"),
        ({"dtype": torch.float64}, "activations are torch.float64, not bfloat16, float16 or float32"),
        ({"zero_points": True}, "weights are uint4b8 with zero points"),
        ({"symmetric": False, "zero_points": False}, "weights are uint4 without zero points"),
    ],
)
def test_can_implement_says_why_not(changes, why):
    assert kernel_class().can_implement(layer_config(**changes)) == (False, why)


def test_can_implement_refuses_other_widths():
    from vllm.scalar_type import scalar_types

    config = layer_config(weight_type=scalar_types.uint8b128)
    assert kernel_class().can_implement(config) == (False, "weights are uint8b128, not uint4b8 or uint4")


@pytest.mark.usefixtures("stock_vllm")
def test_vllm_chooses_the_kernel_and_refuses_what_it_cannot_serve_with_the_reason():
    from vllm.model_executor.kernels.linear import choose_mp_linear_kernel

    assert w4a16_linear.install()
    assert choose_mp_linear_kernel(layer_config()) is kernel_class()
    with pytest.raises(
        ValueError, match="TorchInt4LinearKernel cannot implement due to: the group size is 16"
    ):
        choose_mp_linear_kernel(layer_config(group=16))


def test_the_products_shape_is_known_without_running_it():
    """What torch.compile asks when a variant is baked."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    config = layer_config(256, 64)
    layer, _ = quantised_layer(config, "compressed-tensors")
    kernel = kernel_class()(config, "q", "s", "z")
    kernel.process_weights_after_loading(layer)
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(3, 256, dtype=torch.bfloat16)
        assert kernel.apply_weights(layer, x).shape == (3, 64)


def test_reason_is_none_with_avx512_and_on_other_architectures(monkeypatch):
    from vllm.platforms import CpuArchEnum, current_platform

    monkeypatch.setattr("torch.cpu._is_avx512_supported", lambda: False)
    monkeypatch.setattr(type(current_platform), "get_cpu_architecture", lambda *_: CpuArchEnum.X86)
    assert "no AVX-512" in w4a16_linear.reason()
    monkeypatch.setattr(type(current_platform), "get_cpu_architecture", lambda *_: CpuArchEnum.ARM)
    assert w4a16_linear.reason() is None
    monkeypatch.undo()
    monkeypatch.setattr("torch.cpu._is_avx512_supported", lambda: True)
    assert w4a16_linear.reason() is None


@pytest.mark.skipif(torch.cpu._is_avx512_supported(), reason="vLLM loads its AVX-512 library here")
def test_the_fix_is_still_needed():
    """Fails when vLLM's AVX2 library has the product: the fix can go then."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    assert not hasattr(torch.ops._C, "cpu_gemm_wna16")


@pytest.mark.usefixtures("stock_vllm")
def test_install_refuses_when_vllms_kernel_is_not_in_the_list(monkeypatch):
    from vllm.model_executor.kernels import linear
    from vllm.platforms.interface import PlatformEnum

    monkeypatch.setitem(linear._POSSIBLE_KERNELS, PlatformEnum.CPU, [])
    with pytest.raises(EngineFixError, match="do not include CPUWNA16LinearKernel"):
        w4a16_linear.install()


@pytest.mark.usefixtures("stock_vllm")
def test_install_refuses_when_a_kernel_must_have_another_method(monkeypatch):
    from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel

    methods = MPLinearKernel.__abstractmethods__ | {"warm_up"}
    monkeypatch.setattr(MPLinearKernel, "__abstractmethods__", methods)
    with pytest.raises(EngineFixError, match=r"must now have .*warm_up"):
        w4a16_linear.install()
