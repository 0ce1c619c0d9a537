from types import SimpleNamespace

import pytest

from slimqwen import variant
from slimqwen.serving import baked_cache, gpu, unsafe_engines
from slimqwen.serving.errors import ServingError
from slimqwen.serving.gpu import Gpu, first_visible

A40 = Gpu(0, "NVIDIA A40", "GPU-aa11-0000", "8.6", (0, 9, 0))
L4 = Gpu(1, "NVIDIA L4", "GPU-bb22-0000", "8.9", (0, 3, 0))
T4 = Gpu(2, "Tesla T4", "GPU-bb33-0000", "7.5", (0, 5, 0))


@pytest.fixture
def host(monkeypatch):
    """Three GPUs, of which the shell shows some."""

    def make(shell=None, gpus=(A40, L4, T4)):
        monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if shell is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shell)
        monkeypatch.setattr(gpu, "all_gpus", lambda: list(gpus))

    return make


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, A40),
        ({"CUDA_VISIBLE_DEVICES": "0"}, A40),
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, T4),
        ({"CUDA_VISIBLE_DEVICES": " 1 "}, L4),
        ({"CUDA_VISIBLE_DEVICES": "GPU-bb33-0000,0"}, T4),
        ({"CUDA_VISIBLE_DEVICES": "GPU-bb2"}, L4),
        ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, L4),
        ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "2"}, A40),
    ],
)
def test_a_config_env_chooses_among_all_gpus_by_index_or_uuid(host, config, expected):
    host()
    assert first_visible(config) == expected


def test_the_shell_decides_where_the_config_env_says_nothing_and_else_the_config_env(host):
    shown = (
        Gpu(0, *("NVIDIA L4", L4.uuid, "8.9", L4.bus)),
        Gpu(1, *("NVIDIA A40", A40.uuid, "8.6", A40.bus)),
    )
    host(shell="1,0", gpus=shown)
    assert first_visible({}).name == "NVIDIA L4"
    assert first_visible({"CUDA_VISIBLE_DEVICES": "0"}).name == "NVIDIA A40"
    assert first_visible({"CUDA_VISIBLE_DEVICES": A40.uuid}).name == "NVIDIA A40"


@pytest.mark.parametrize("name", ["7", "2", "-1", "GPU-cc", "MIG-aa11"])
def test_a_gpu_that_the_shell_hides_is_an_error_with_the_cure(host, name):
    host(shell="0,1", gpus=(A40, L4))
    with pytest.raises(ServingError, match=f"names {name}, .*export it in the shell"):
        first_visible({"CUDA_VISIBLE_DEVICES": name})


def test_without_a_gpu_there_is_none(host):
    host(gpus=())
    assert first_visible({"CUDA_VISIBLE_DEVICES": "1"}) is None


def test_cache_and_findings_are_those_of_the_first_visible_gpu(host):
    host()
    second = {"CUDA_VISIBLE_DEVICES": "1"}
    assert baked_cache.this_machine("cuda", second)["compute capability"] == "8.9"
    assert baked_cache.this_device("cuda", second) == "NVIDIA L4"
    assert unsafe_engines.build(variant.load("tiny").weights, "cuda", second).device == "8.9"
    assert baked_cache.this_device("cpu", second) == ""


@pytest.mark.parametrize(("is_integrated", "free"), [(False, 3), (True, 90)])
def test_files_that_the_kernel_caches_take_no_memory_of_a_gpu_that_shares_the_machines(
    monkeypatch, is_integrated, free
):
    facts = SimpleNamespace(is_integrated=is_integrated)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda index: (3, 128))
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: facts)
    monkeypatch.setattr(gpu, "available_memory", lambda: 90)
    assert gpu.free_and_total_memory(0) == (free, 128)
