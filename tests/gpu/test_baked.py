"""The rehearsal of step e of `make gpu-check`, in this process."""

import time
from pathlib import Path

import pytest

from slimqwen import variant
from slimqwen.processes import spawner
from tests.gpu.baked import bake_and_start
from tests.gpu.steps import Here


@pytest.mark.engine
def test_an_archive_that_was_baked_here_starts_a_server_that_requires_it_and_its_plan(tmp_path: Path) -> None:
    here = Here(variant.repository_root(), None, tmp_path / "e.json", deadline=time.monotonic() + 600)
    with spawner.share_spawner():
        bake_and_start(here, tmp_path)
    assert here.failures() == []
    baked, started = here.parts["bake"], here.parts["start from it"]
    assert started["loaded"] >= baked["graphs"] > 0
    assert started["facts"] > 0
