"""A variant beside its baseline, judged by stand-ins of the measurements."""

from collections.abc import Callable
from pathlib import Path

import pytest

from slimqwen import variant
from slimqwen.checkpoint.files import carry_all
from slimqwen.variant import Variant
from tests.evals.gate_checks import Checks, link_settings
from tests.evals.recipe_made import made  # noqa: F401  (a fixture)
from tests.evals.small_suite import parse, recorded, small_suite  # noqa: F401  (fixtures)

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch, stamps: None) -> Checks:
    stand_ins = Checks()
    stand_ins.install(monkeypatch)
    return stand_ins


@pytest.fixture
def one(tmp_path: Path, add_variant: Callable[..., Path]) -> Variant:
    add_variant("tiny", "VLLM_MODEL=weights/tiny\nVLLM_MAX_MODEL_LEN=256\n")
    add_variant("small", "BASE=tiny\nVLLM_MODEL=weights/small\n", baseline="tiny")
    (tmp_path / "weights" / "small").mkdir(parents=True)
    (tmp_path / "weights" / "tiny").symlink_to(ROOT / "weights" / "tiny")
    carry_all(ROOT / "weights" / "tiny", tmp_path / "weights" / "small")
    link_settings(tmp_path)
    return variant.load("small", tmp_path)
