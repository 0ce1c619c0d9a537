"""GPUs of eval/devices.yaml: their data sheets and drivers."""

from pathlib import Path

import pytest

from slimqwen import variant
from slimqwen.plan import devices
from slimqwen.plan.record import DEFAULT_GPUS
from slimqwen.records.settings import SettingsError

ROOT = variant.repository_root()


def test_every_gpu_of_the_file_is_read_and_names_only_itself():
    known = devices.read_gpus(ROOT)
    assert set(known) == {
        *("a10", "a10g", "a100-40gb", "a100", "b200", "h100", "h200", "l4", "l40s", "t4"),
        *("rtx-3060", "rtx-3090", "rtx-4060-ti", "rtx-4090", "rtx-5080", "rtx-5090", "rtx-pro-6000"),
    }
    assert set(DEFAULT_GPUS) <= set(known)
    names = [name for one in known.values() for name in one.nvidia_smi]
    assert len(names) == len(set(names))
    for short_name, one in known.items():
        assert one.name == short_name
        assert all(devices.find_gpu(name, ROOT) == one for name in one.nvidia_smi)
        # 8-bit floats have units of their own from compute capability 8.9 on.
        assert (one.dense_peak_tflops.fp8 is not None) == (one.capability >= (8, 9))
        assert 0.9 < one.driver.memory_gib / one.memory_gib < 1, "a driver keeps a little"
    assert devices.find_gpu("GPU", ROOT) is None
    assert [known[name].default_max_num_seqs for name in ("a10g", "a100", "h100")] == [256, 256, 1024]


def test_figures_of_a_gpu_are_in_plain_units():
    a10g = devices.read_gpu("a10g", ROOT)
    assert (a10g.peak("bf16"), a10g.peak("int8"), a10g.bandwidth) == (70e12, 140e12, 600e9)
    assert a10g.peak("fp8") == a10g.peak("bf16")
    assert (a10g.capability, a10g.driver.memory_bytes) == ((8, 6), int(22.49 * 2**30))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a11g", r"did you mean a10g\?"),
        ("h1000", r"did you mean h100\?"),
        ("rtx4090", r"did you mean rtx-4090\?"),
        ("zzz", "known are a10, a100, a100-40gb"),
    ],
)
def test_an_unknown_gpu_names_the_nearest(name: str, said: str):
    with pytest.raises(
        devices.UnknownGpuError, match=rf"there is no GPU '{name}' in eval/devices\.yaml; {said}"
    ):
        devices.read_gpu(name, ROOT)


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
        (", shared_memory_kib: 64", "", "t4.driver.shared_memory_kib is missing; add it"),
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
