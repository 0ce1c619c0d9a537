"""A repository for the explorations of scripts/."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from slimqwen import variant
from slimqwen.cli import exploration
from tests.checkpoints import TINY


@pytest.fixture
def tiny(
    tmp_path: Path, add_variant: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> variant.Variant:
    """A variant of a repository of its own that serves the embedded model."""
    add_variant(
        "tiny",
        "VLLM_MODEL=weights/tiny\nVLLM_DTYPE=bfloat16\nVLLM_MAX_MODEL_LEN=128\nVLLM_MAX_NUM_SEQS=1\n"
        "VLLM_ENABLE_PREFIX_CACHING=0\nVLLM_ENFORCE_EAGER=1\n",
    )
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "tiny").symlink_to(TINY)
    monkeypatch.setattr(exploration.variants, "load", partial(variant.load, root=tmp_path))
    return variant.load("tiny")
