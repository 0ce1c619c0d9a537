"""GPU models that can be simulated."""

import pytest

from slimqwen import variant
from slimqwen.plan import gpu_model
from slimqwen.records.settings import SettingsError

ROOT = variant.repository_root()


def test_every_gpu_of_the_default_table_is_listed():
    from slimqwen.plan.record import DEFAULT_GPUS

    models = gpu_model.read_gpu_models(ROOT)
    assert set(DEFAULT_GPUS) <= set(models)
    assert models["a10g"].capability == (8, 6)
    assert models["a10g"].memory_bytes == int(22.49 * 2**30)


def test_an_unknown_gpu_lists_those_that_there_are():
    with pytest.raises(
        gpu_model.GpuModelError, match=r"there is no GPU 'a11g' in eval/devices\.yaml; choose a10g,?"
    ):
        gpu_model.load_gpu_model(ROOT, "a11g")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (
            "a: {nvidia_smi: [A], compute_capability: '8.6', driver: {memory_gib: 1, multiprocessors: 1}}",
            "shared_memory_kib: Field required",
        ),
        ("a: {nvidia_smi: [A], compute_capability: '8.6'}", "memory_gib: Field required"),
        ("[", "while parsing"),
        (None, "is missing; `git checkout"),
    ],
)
def test_a_damaged_list_is_one_line(tmp_path, content, reason):
    if content is not None:
        (tmp_path / "eval").mkdir()
        (tmp_path / gpu_model.FILE).write_text(content)
    with pytest.raises(SettingsError, match=reason):
        gpu_model.read_gpu_models(tmp_path)
