"""What every test may use: a repository of its own, and one served model for the whole session."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

# In-process engines take one thread unless told; hubs are never asked.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import pytest

from slimqwen import variant
from slimqwen.serving import launch

AddVariant = Callable[..., Path]


@pytest.fixture
def add_variant(tmp_path: Path) -> AddVariant:
    """Write experiments/<name>/ into an otherwise empty repository at tmp_path; returns its config.env."""

    def add(name: str, config: str, *, baseline: str | None = None) -> Path:
        folder = tmp_path / "experiments" / name
        folder.mkdir(parents=True)
        (folder / "config.env").write_text(config, encoding="utf-8")
        content = {
            "schema": "measurements/1",
            "hypothesis": f"what {name} shows",
            "baseline": baseline,
            "status": "planned",
            "verdict": None,
            "records": [],
        }
        (folder / "measurements.json").write_text(json.dumps(content), encoding="utf-8")
        return folder / "config.env"

    return add


@pytest.fixture(scope="session")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[launch.RunningServer]:
    """The committed tiny model behind a real vLLM, one for the session."""
    command = launch.resolve(variant.load("tiny"), port=launch.free_port(), platform="cpu")
    with launch.serving(command, log=tmp_path_factory.mktemp("tiny-server") / "vllm.log") as server:
        yield server
