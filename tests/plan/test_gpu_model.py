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
        gpu_model.GpuModelError, match=r"there is no GPU 'a11g' in eval/devices\.yaml; did you mean a10g\?"
    ):
        gpu_model.load_gpu_model(ROOT, "a11g")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (
            "a:\n  nvidia_smi: [A]\n  compute_capability: '8.6'\n  driver: {memory_gib: 1, multiprocessors: 1}",
            r"^eval/devices\.yaml:4: a\.driver\.shared_memory_kib is missing; add it",
        ),
        (
            "a:\n  memory_gib: 1\n  nvidia_smi: [A]\n  compute_capability: '8.6'\n"
            "  driver:\n    memory_gib: 0\n    multiprocessors: 1\n    shared_memory_kib: 1",
            r"^eval/devices\.yaml:6: a\.driver\.memory_gib: Input should be greater than 0, here is 0",
        ),
        ("a:\n  nvidia_smi: [A]\n  compute_capability: '8.6'", "1: a.driver is missing; add it"),
        ("[", "1: not usable YAML"),
        (None, "is missing; `git checkout"),
    ],
)
def test_a_damaged_list_is_one_line(tmp_path, content, reason):
    if content is not None:
        (tmp_path / "eval").mkdir()
        (tmp_path / gpu_model.FILE).write_text(content)
    with pytest.raises(SettingsError, match=reason):
        gpu_model.read_gpu_models(tmp_path)
