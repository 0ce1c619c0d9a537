"""Data sheets of GPUs."""

from pathlib import Path

import pytest

from slimqwen import variant
from slimqwen.plan.gpu_model import GpuModelError
from slimqwen.records.settings import SettingsError
from slimqwen.roofline import gpu

ROOT = variant.repository_root()


def test_every_gpu_of_the_file_is_read_and_names_only_itself():
    known = gpu.read_gpus(ROOT)
    assert set(known) == {
        *("a10", "a10g", "a100-40gb", "a100", "b200", "h100", "h200", "l4", "l40s", "t4"),
        *("rtx-3060", "rtx-3090", "rtx-4060-ti", "rtx-4090", "rtx-5080", "rtx-5090", "rtx-pro-6000"),
    }
    names = [name for one in known.values() for name in one.nvidia_smi]
    assert len(names) == len(set(names))
    assert (known["a10g"].peak("bf16"), known["a10g"].bandwidth) == (70e12, 600e9)
    assert known["a10g"].peak("fp8") == known["a10g"].peak("bf16")
    for one in known.values():
        # 8-bit floats have units of their own from compute capability 8.9 on.
        assert (one.dense_peak_tflops.fp8 is not None) == (float(one.compute_capability) >= 8.9)
    assert [known[name].default_max_num_seqs for name in ("a10g", "a100", "h100")] == [256, 256, 1024]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("h1000", "choose h100,?"),
        ("rtx4090", "choose rtx-4090,?"),
        ("zzz", "choose rtx-3060, rtx-3090"),
    ],
)
def test_an_unknown_gpu_names_the_nearest(name: str, said: str):
    with pytest.raises(GpuModelError, match=rf"there is no GPU '{name}' in eval/devices\.yaml; {said[:-1]}"):
        gpu.read_gpu(name, ROOT)


def test_a_faulty_file_of_gpus_is_one_line(tmp_path: Path):
    with pytest.raises(SettingsError, match=r"devices\.yaml is missing"):
        gpu.read_gpus(tmp_path)
    file = tmp_path / "eval" / "devices.yaml"
    file.parent.mkdir()
    good = (ROOT / "eval" / "devices.yaml").read_text()
    for wrong, said in (
        (
            good.replace("per_s: 600", "per_s: -600", 1),
            "memory_bandwidth_gb_per_s: Input should be greater than 0",
        ),
        (good.replace("bf16: 70, ", "", 1), "a10g.dense_peak_tflops.bf16 is missing; add it"),
        (good.replace("source:", "sauce:", 1), "unknown key 'sauce'; did you mean source?"),
        ("a10g: [", "not usable YAML"),
        ("- a10g", "the file: Input should be keys with values"),
        ("a10g:\n- a", "a10g: Input should be keys with values"),
    ):
        file.write_text(wrong)
        with pytest.raises(SettingsError, match=r"^eval/devices\.yaml:\d+: ") as raised:
            gpu.read_gpus(tmp_path)
        assert said in str(raised.value)
