from types import SimpleNamespace

import pytest
import torch

from slimqwen.serving import baked_cache, gpu


@pytest.fixture
def host(monkeypatch):
    """A machine with these GPUs, (name, major, minor) each, as far as torch tells."""

    def make(*gpus):
        facts = [
            SimpleNamespace(name=name, major=major, minor=minor, total_memory=24 * 2**30)
            for name, major, minor in gpus
        ]
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(facts))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(facts))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: facts[index])

    return make


def test_a_server_computes_on_the_first_gpu_of_the_shell(host):
    host(("NVIDIA A40", 8, 6), ("NVIDIA L4", 8, 9))
    assert gpu.all_gpus() == [
        gpu.CudaDevice(0, "NVIDIA A40", "8.6", 24),
        gpu.CudaDevice(1, "NVIDIA L4", "8.9", 24),
    ]
    facts = baked_cache.describe_machine("cuda")
    assert (facts["GPU"], facts["compute capability"]) == ("NVIDIA A40", "8.6")


def test_without_a_gpu_there_is_none(host):
    host()
    assert gpu.first_gpu() is None
    assert baked_cache.describe_machine("cuda")["GPU"] == "none"


@pytest.mark.parametrize(("is_integrated", "free"), [(False, 3), (True, 90)])
def test_files_that_the_kernel_caches_take_no_memory_of_a_gpu_that_shares_the_machines(
    monkeypatch, is_integrated, free
):
    facts = SimpleNamespace(is_integrated=is_integrated)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda index: (3, 128))
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: facts)
    monkeypatch.setattr(gpu, "available_memory", lambda: 90)
    assert gpu.free_and_total_memory() == (free, 128)


@pytest.mark.parametrize(
    ("readings", "free"),
    [([10, 40, 90, 99], 90), ([10, 40, 40], 40)],
    ids=["released in time", "held by another"],
)
def test_memory_that_an_ended_process_still_releases_is_waited_for(monkeypatch, readings, free):
    left = iter(readings)
    clock = iter(range(0, 100, 2))  # seconds: three without growth pass between two readings
    monkeypatch.setattr(gpu, "free_and_total_memory", lambda: (next(left, readings[-1]), 128))
    monkeypatch.setattr(
        gpu, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda seconds: None)
    )
    assert gpu.await_free_memory(80) == free
