"""Fidelity: which variant counts as unchanged, and two that compare the same at once."""

import shutil

import pytest

from slimqwen import variant
from slimqwen.evals import fidelity
from slimqwen.evals.fidelity_figures import FidelitySettings
from slimqwen.records.journal import RunInProgressError
from tests.evals.gate_checks import ONCE

ROOT = variant.repository_root()


TINY = ROOT / "weights" / "tiny"


@pytest.mark.parametrize(
    ("line", "is_same"),
    [
        ("VLLM_MAX_NUM_SEQS=3", True),
        ("VLLM_KV_CACHE_DTYPE=bfloat16", False),
        ("VLLM_MODEL=weights/other", False),
    ],
)
def test_only_the_baselines_own_checkpoint_and_dtypes_are_unchanged(add_variant, tmp_path, line, is_same):
    add_variant("base", "VLLM_MODEL=weights/tiny\nVLLM_MAX_MODEL_LEN=256\n")
    add_variant("other", f"BASE=base\n{line}\n", baseline="base")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "tiny").symlink_to(TINY)
    other = shutil.copytree(TINY, tmp_path / "weights" / "other")
    (other / "config.json").write_text((other / "config.json").read_text() + "\n")
    base, compared = (variant.load(name, tmp_path) for name in ("base", "other"))
    assert fidelity._has_same_model(compared, base) == is_same


def test_who_compares_the_same_two_meanwhile_is_refused_and_the_next_is_not(one, monkeypatch):
    settings, done = FidelitySettings.load("tinyworld", one.root), []

    def meanwhile(*_):
        with pytest.raises(RunInProgressError, match=r"runs the same measurement .* wait until it ends"):
            fidelity.measure_fidelity(one, settings, ONCE)
        done.append(one.folder / "a record")
        return done[-1]

    monkeypatch.setattr(fidelity, "_compare", meanwhile)
    for _ in range(2):
        assert fidelity.measure_fidelity(one, settings, ONCE) == done[-1]
    assert len(done) == 2
    assert list((one.root / ".cache" / "fidelity").iterdir()) == []
