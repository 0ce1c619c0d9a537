"""A repository in small: a baseline, three variants of it, and a suite."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.search.sweep import stand_in

ROOT = Path(__file__).parents[3]
SUITE = """
chat_template: false
sample: first
tasks:
  - {task: facts, measure: exact_match, non_inferiority_margin: 0.1}
  - {task: prose, measure: bits_per_byte, non_inferiority_margin: 0.1}
"""


@pytest.fixture
def repository(tmp_path: Path, add_variant: Callable[..., Path], stamps: None) -> Path:
    add_variant("base", "VLLM_MODEL=weights/tiny\nEVALUATION=small\nVLLM_MAX_MODEL_LEN=512\n")
    for name, sequences in (("a", 2), ("b", 4), ("e", 8)):
        add_variant(name, f"BASE=base\nVLLM_MAX_NUM_SEQS={sequences}\n", baseline="base")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "tiny").symlink_to(ROOT / "weights" / "tiny")
    (tmp_path / "eval" / "suites").mkdir(parents=True)
    (tmp_path / "eval" / "suites" / "small.yaml").write_text(SUITE)
    stand_in.describe_variants(("base", "a", "b", "e"), tmp_path)
    return tmp_path
