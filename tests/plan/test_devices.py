"""GPUs of eval/devices.yaml: their data sheets and drivers."""

import math
from pathlib import Path

import pytest

from slimqwen import variant
from slimqwen.fit.tables import TABLE_GPUS
from slimqwen.plan import devices
from slimqwen.records.settings import SettingsError

ROOT = variant.repository_root()


def test_every_gpu_of_the_file_is_read_and_names_only_itself():
    known = devices.read_gpus(ROOT)
    assert len(known) >= 115
    assert set(TABLE_GPUS) <= set(known)
    names = [(name, one.memory_gib) for one in known.values() for name in one.nvidia_smi]
    assert len(names) == len(set(names)), "GPUs of one name differ in their memory"
    for short_name, one in known.items():
        assert one.name == short_name
        assert all(devices.find_gpu(name, ROOT, one.cuda_memory_gib) == one for name in one.nvidia_smi)
        # 8-bit floats have units of their own from compute capability 8.9 on.
        peaks = one.dense_peak_tflops
        assert peaks is None or (peaks.fp8 is not None) == (one.capability >= (8, 9))
        assert 0.9 < one.cuda_memory_gib / one.memory_gib < 1, "a driver keeps a little"
        assert one.is_served == (not short_name.startswith("v100"))
    assert devices.find_gpu("GPU", ROOT) is None
    assert [known[name].default_max_num_seqs for name in ("a10g", "a100", "h100")] == [256, 256, 1024]


def test_figures_of_a_gpu_are_in_plain_units():
    a10g = devices.read_gpu("a10g", ROOT)
    assert (a10g.peak("bf16"), a10g.peak("int8"), a10g.bandwidth) == (70e12, 140e12, 600e9)
    assert a10g.peak("fp8") == a10g.peak("bf16")
    assert (a10g.capability, a10g.cuda_memory_bytes) == ((8, 6), int(22.49 * 2**30))


@pytest.mark.parametrize(
    ("said", "name"),
    [
        *((name, "rtx-3060-laptop") for name in ("NVIDIA GeForce RTX 3060 Laptop GPU", "RTX 3060 mobile")),
        *((name, "rtx-4090") for name in ("rtx4090", "4090", "GeForce RTX 4090")),
        *((name, "a100") for name in ("NVIDIA A100-SXM4-80GB", "A100 80GB")),
        *((name, "rtx-a6000") for name in ("NVIDIA RTX A6000", "A6000")),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("RTX PRO 6000", "rtx-pro-6000"),
        ("RTX 4060 Ti 16GB", "rtx-4060-ti"),
        ("Jetson AGX Orin 64GB", "agx-orin-64gb"),
        ("Tesla T4", "t4"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA GB10", "gb10"),
    ],
)
def test_a_gpu_has_the_names_that_nvidia_smi_and_people_give_it(said: str, name: str):
    assert devices.read_gpu(said, ROOT).name == name


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "a11g",
            r"there is no GPU 'a11g' in eval/devices\.yaml; did you mean a10g\? Or describe it: `--gpu mem",
        ),
        (
            "zzz",
            "there is no GPU 'zzz' in eval/devices.yaml; describe it: `--gpu memory=16,bandwidth=448,cap",
        ),
        ("NVIDIA GeForce RTX 4060 Ti", "is sold with 8 or 16 GB; name rtx-4060-ti-8gb or rtx-4060-ti"),
        ("memory=16,bandwidth=448", "capability: field required; the keys are memory, bandwidth, cap"),
        ("memory=16,bandwidth=x,capability=8.9", "bandwidth: input should be a valid number"),
        ("memory=16,bandwith=448,capability=8.9", "the keys are memory, bandwidth, capability, multip"),
    ],
)
def test_an_unknown_gpu_names_the_nearest_or_how_to_describe_one(name: str, said: str):
    with pytest.raises(devices.UnknownGpuError, match=said):
        devices.read_gpu(name, ROOT)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        *(
            (name, "not on those of AMD, Intel or Apple")
            for name in ("RX 7900 XTX", "MI300X", "Arc A770", "M3 Max")
        ),
        *((name, "it has a lower one") for name in ("GTX 1080 Ti", "Tesla P40", "V100", "Titan Xp")),
        *((name, "it has 7.0") for name in ("Tesla V100-SXM2-32GB", "v100s")),
        ("memory=24,bandwidth=347,capability=6.1", "it has 6.1"),
    ],
)
def test_a_gpu_that_vllm_has_no_kernels_for_is_refused_in_one_line(name: str, said: str):
    with pytest.raises(devices.UnservedGpuError, match=f"is not served: .*{said}"):
        devices.read_gpu(name, ROOT)


def test_a_described_gpu_has_its_figures_and_no_peak():
    gpu = devices.read_gpu(devices.DESCRIPTION, ROOT)
    assert (gpu.name, gpu.memory_gib, gpu.bandwidth, gpu.capability) == (
        devices.DESCRIPTION,
        16,
        448e9,
        (8, 9),
    )
    assert gpu.peak("bf16") == math.inf
    written = devices.read_gpu("memory=16GB,bandwidth=448 GB/s,capability=12,tflops=50", ROOT)
    assert (written.capability, written.peak("bf16"), written.shared_memory_bytes) == (
        (12, 0),
        50e12,
        99 * 2**10,
    )


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        (
            "per_s: 600",
            "per_s: -600",
            "memory_bandwidth_gb_per_s: Input should be greater than 0, here is -600",
        ),
        ("bf16: 70, ", "", "a10g.dense_peak_tflops.bf16 is missing; add it"),
        ("source:", "sauce:", "unknown key 'sauce'; did you mean source?"),
        (
            "memory_gib: 22.49",
            "memory_gib: 0",
            "driver.memory_gib: Input should be greater than 0, here is 0",
        ),
        (", multiprocessors: 40}", "}", "t4.driver.multiprocessors is missing; add it"),
        (None, "- a10g", "the file: Input should be keys with values"),
        (None, "a10g:\n- a", "a10g: Input should be keys with values"),
    ],
)
def test_a_faulty_file_of_gpus_is_one_line(tmp_path: Path, right: str | None, wrong: str, said: str):
    file = tmp_path / devices.FILE
    file.parent.mkdir()
    good = (ROOT / devices.FILE).read_text()
    assert right is None or right in good
    file.write_text(wrong if right is None else good.replace(right, wrong, 1))
    with pytest.raises(SettingsError, match=r"^eval/devices\.yaml:\d+: ") as raised:
        devices.read_gpus(tmp_path)
    assert said in str(raised.value)


def test_a_missing_file_of_gpus_can_be_restored(tmp_path: Path):
    with pytest.raises(SettingsError, match=r"devices\.yaml is missing; `git checkout"):
        devices.read_gpus(tmp_path)
