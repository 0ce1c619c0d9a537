"""The GPUs that this host's driver states, by what nvidia-smi would print."""

from types import SimpleNamespace

import psutil
import pytest

from slimqwen import variant
from slimqwen.plan import host_gpus
from slimqwen.plan.devices import UnknownGpuError, UnservedGpuError, read_gpu
from slimqwen.plan.host_gpus import choose_gpu

ROOT = variant.repository_root()


@pytest.fixture
def shows(monkeypatch):
    """shows(line, …): a host whose nvidia-smi prints a line each, without index and UUID; of no GPU without a line."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def show(*lines: str) -> None:
        text = "".join(f"{index}, GPU-{index}abc, {line}\n" for index, line in enumerate(lines))
        monkeypatch.setattr(
            host_gpus,
            "subprocess",
            SimpleNamespace(run=lambda *_, **__: SimpleNamespace(stdout=text), TimeoutExpired=OSError),
        )

    return show


RTX_3090 = "NVIDIA GeForce RTX 3090, 8.6, 24576, 320, [N/A]"
L4 = "NVIDIA L4, 8.9, 23034, 500, [N/A]"


@pytest.mark.parametrize(
    ("lines", "name", "memory_gib", "here"),
    [
        ([RTX_3090], "rtx-3090", 23.69, 1),
        ([RTX_3090, L4, RTX_3090], "rtx-3090", 23.69, 2),
        (["NVIDIA GeForce RTX 4060 Ti, 8.9, 8188, 300, [N/A]"], "rtx-4060-ti-8gb", 7.7, 1),
        (["NVIDIA GeForce RTX 4060 Ti, 8.9, 16380, 300, [N/A]"], "rtx-4060-ti", 15.7, 1),
        (["NVIDIA A100-SXM4-80GB, 8.0, 81920, 870, Disabled"] * 8, "a100", 79.15, 8),
        (["Tesla V100-SXM2-16GB, 7.0, 16384, 300, [N/A]", L4], "l4", 22.01, 1),
    ],
)
def test_the_gpu_is_the_first_that_is_served_with_the_memory_of_its_driver(
    shows, lines, name, memory_gib, here
):
    shows(*lines)
    chosen = choose_gpu(None, ROOT)
    assert (chosen.gpu.name, chosen.gpu.cuda_memory_gib, chosen.here) == (name, memory_gib, here)


def test_a_gpu_without_memory_of_its_own_has_the_hosts(shows, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=121 * 2**30))
    shows("NVIDIA GB10, 12.1, [N/A], [N/A], [N/A]")
    assert choose_gpu(None, ROOT).gpu == read_gpu("gb10", ROOT).with_memory(121)


def test_a_named_gpu_has_its_drivers_memory_where_it_is_here_and_the_lists_elsewhere(shows):
    shows("NVIDIA GeForce RTX 3090, 8.6, 24576, 576, [N/A]")
    assert choose_gpu("rtx-3090", ROOT).gpu.cuda_memory_gib == 23.44
    assert choose_gpu("l4", ROOT) == (read_gpu("l4", ROOT), 0)
    shows()
    assert choose_gpu(None, ROOT) is None


@pytest.mark.parametrize(
    ("visible", "name"), [("1", "l4"), ("GPU-1abc", "l4"), ("0,1", "rtx-3090"), ("", None)]
)
def test_gpus_that_the_shell_hides_are_not_here(shows, monkeypatch, visible, name):
    shows(RTX_3090, L4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    chosen = choose_gpu(None, ROOT)
    assert (chosen and chosen.gpu.name) == name


@pytest.mark.parametrize(
    ("line", "error", "said"),
    [
        (
            "NVIDIA GeForce RTX 6090, 13.0, 32768, 400, [N/A]",
            UnknownGpuError,
            "memory=32,bandwidth=448,capability=13.0`",
        ),
        (
            "NVIDIA A100-SXM4-80GB, 8.0, 81920, 870, Enabled",
            UnknownGpuError,
            "is split .MIG.*memory=40,bandwidth=448",
        ),
        (
            "NVIDIA GeForce GTX 1080, 6.1, 8192, 100, [N/A]",
            UnservedGpuError,
            "GTX 1080 is not served: .* it has 6.1",
        ),
    ],
)
def test_a_gpu_that_the_list_cannot_describe_is_one_line_with_a_description_that_works(
    shows, line, error, said
):
    shows(line)
    with pytest.raises(error, match=said) as raised:
        choose_gpu(None, ROOT)
    if error is UnknownGpuError:
        described = str(raised.value).partition("--gpu ")[2].strip("`")
        assert choose_gpu(described, ROOT).gpu.name == described
