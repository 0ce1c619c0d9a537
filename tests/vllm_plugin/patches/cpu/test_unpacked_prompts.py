"""Packed linears that multiply many rows with weights unpacked while loading."""

from types import SimpleNamespace

import psutil
import pytest
import torch

from slimqwen import cgroup
from slimqwen.vllm_plugin.patches.cpu import unpacked_prompts
from tests.vllm_plugin.patches.cpu.test_packed_linears import (
    TOLERANCE,
    Linear,
    kernel_class,
    layer_config,
    layer_of_4_bits,
    layer_of_8_bits,
)

has_wna16 = pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM's library for this CPU has no 4-bit kernel"
)


def class_named(name):
    from vllm.model_executor.kernels.linear import CPUWNA16LinearKernel

    own = {"TorchInt4LinearKernel": 4, "TorchInt8LinearKernel": 8}
    return kernel_class(own[name]) if name in own else CPUWNA16LinearKernel


@pytest.fixture
def linear(stock_vllm, monkeypatch):
    """Make a linear whose kernel has the fix, with or without memory for unpacked weights."""
    from vllm.model_executor.kernels import linear as kernels
    from vllm.platforms.interface import PlatformEnum

    def make(name, room=True, layout="compressed-tensors", **form):
        listed = [class_named(name)]
        monkeypatch.setitem(kernels._POSSIBLE_KERNELS, PlatformEnum.CPU, listed)
        assert unpacked_prompts.install()
        assert not unpacked_prompts.install()
        (kernel,) = listed
        monkeypatch.setattr(unpacked_prompts, "has_room", lambda needed: room)
        config = layer_config(8 if "8" in name else 4, **form)
        layer, matrix = layer_of_8_bits(config) if "8" in name else layer_of_4_bits(config, layout)
        layer.bias = None
        made = kernel(config, "q", "s", None if "8" in name else "z")
        if not hasattr(layer, "z"):
            layer.z = None
        made.process_weights_after_loading(layer)
        return Linear(made, layer, matrix)

    return make


KERNELS = [
    pytest.param("CPUWNA16LinearKernel", marks=has_wna16),
    "TorchInt4LinearKernel",
    "TorchInt8LinearKernel",
]


def check(made, rows, dtype=torch.bfloat16):
    x = torch.randn(rows, made.matrix.shape[1]).to(dtype)
    expected = x.float() @ made.matrix.t()
    result = made.kernel.apply_weights(made.layer, x)
    assert (result.dtype, result.shape) == (dtype, expected.shape)
    assert (result.float() - expected).norm() <= 2 * TOLERANCE[dtype] * expected.norm()
    return x, result


@pytest.mark.parametrize("room", [True, False])
@pytest.mark.parametrize("rows", [1, 16, 17, 1024])
@pytest.mark.parametrize("name", KERNELS)
def test_a_product_is_that_of_the_dequantised_matrix_with_and_without_memory(linear, name, rows, room):
    torch.manual_seed(0)
    made = linear(name, room)
    x, result = check(made, rows)
    bias = torch.randn(64).to(x.dtype)
    with_bias = made.kernel.apply_weights(made.layer, x, bias)
    assert (with_bias - result - bias).float().norm() <= 0.01 * result.float().norm()


@has_wna16
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 128, 256])
@pytest.mark.parametrize("layout", ["compressed-tensors", "gptq"])
def test_every_layout_of_4_bits_is_unpacked_before_and_after_the_kernel_repacks_it(
    linear, layout, group, symmetric
):
    torch.manual_seed(0)
    for room in (True, False):
        check(linear("CPUWNA16LinearKernel", room, layout, group=group, symmetric=symmetric), 1024)


@pytest.mark.parametrize("name", KERNELS)
def test_only_a_layer_with_room_is_unpacked_and_few_rows_stay_packed(linear, name, monkeypatch):
    products = []
    packed = unpacked_prompts._PRODUCTS[name]
    monkeypatch.setitem(
        unpacked_prompts._PRODUCTS,
        name,
        lambda rows, *others: products.append(len(rows)) or packed(rows, *others),
    )
    for room in (True, False):
        made = linear(name, room)
        assert (int(made.layer.unpacked_number) in unpacked_prompts._unpacked) == room
        for rows in (5, 16, 17, 300):
            check(made, rows)
    assert products == [5, 16, 5, 16, 17, 300]


def test_an_output_head_stays_packed(linear, monkeypatch):
    from vllm.model_executor.layers import vocab_parallel_embedding

    monkeypatch.setattr(vocab_parallel_embedding, "VocabParallelEmbedding", torch.nn.Module)
    assert not hasattr(linear("TorchInt8LinearKernel").layer, "unpacked_number")


def test_an_unpacked_layer_is_freed_with_its_model(linear):
    made = linear("TorchInt8LinearKernel")
    number = int(made.layer.unpacked_number)
    assert number in unpacked_prompts._unpacked
    del made
    assert number not in unpacked_prompts._unpacked


@pytest.mark.parametrize("name", KERNELS)
def test_one_compiled_graph_serves_few_and_many_rows_with_and_without_memory(linear, name):
    for room in (True, False):
        kernel, layer, matrix = linear(name, room)
        compiled = torch.compile(
            lambda x, k=kernel, y=layer: k.apply_weights(y, x), dynamic=True, fullgraph=True
        )
        for rows in (2, 40):
            x = torch.randn(rows, matrix.shape[1]).to(torch.bfloat16)
            assert torch.equal(compiled(x), kernel.apply_weights(layer, x))


@pytest.mark.parametrize(
    ("free_gib", "cache_gib", "needed_gib", "fits"),
    [(16, 0, 11, True), (16, 4, 9, False), (16, 4, 8, True), (4, 0, 1, False)],
)
def test_a_quarter_of_the_memory_stays_free_beside_the_kv_cache(
    monkeypatch, free_gib, cache_gib, needed_gib, fits
):
    monkeypatch.setattr(cgroup, "available_memory", lambda: float(free_gib << 30))
    monkeypatch.setattr(cgroup, "memory_limit", lambda: float(16 << 30))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=64 << 30, total=64 << 30))
    monkeypatch.setattr(unpacked_prompts, "_kv_cache_bytes", lambda: cache_gib << 30)
    assert unpacked_prompts.has_room(needed_gib << 30) == fits


def test_the_variable_switches_the_fix_off_and_every_stage_sets_it(monkeypatch):
    from slimqwen.recipe.registry import STAGES

    monkeypatch.delenv(unpacked_prompts.VARIABLE, raising=False)
    assert unpacked_prompts.is_needed()
    monkeypatch.setenv(unpacked_prompts.VARIABLE, "0")
    assert not unpacked_prompts.is_needed()
    assert STAGES["sample_outputs"].environment[unpacked_prompts.VARIABLE] == "0"


def test_install_refuses_when_no_packed_kernel_is_known(stock_vllm, monkeypatch):
    from vllm.model_executor.kernels import linear as kernels
    from vllm.platforms.interface import PlatformEnum

    from slimqwen.vllm_plugin.patches.upstream import PatchError

    monkeypatch.setitem(kernels._POSSIBLE_KERNELS, PlatformEnum.CPU, [])
    with pytest.raises(PatchError, match="no packed kernel"):
        unpacked_prompts.install()
