"""Random weights and acceptance that is set are refused where answers count."""

import json
import shutil
from pathlib import Path

import pytest

from slimqwen import variant
from slimqwen.evals import acceptance, fidelity, gate, quality
from slimqwen.evals.invocation import Invocation
from slimqwen.serving import speed_only
from slimqwen.serving.errors import ServingError

ROOT = Path(__file__).parents[2]
SYNTHETIC = (
    '{"method": "mtp", "num_speculative_tokens": 4, "rejection_sample_method": "synthetic", '
    '"synthetic_acceptance_length": 3.4}'
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with `tiny`, the same with random weights, and the same with acceptance that is set."""
    for name, lines in (
        ("tiny", []),
        ("random", ["VLLM_MODEL=weights/random"]),
        ("dummy", ["VLLM_LOAD_FORMAT=dummy"]),
        ("synthetic", [f"VLLM_SPECULATIVE_CONFIG='{SYNTHETIC}'"]),
    ):
        folder = tmp_path / "experiments" / name
        folder.mkdir(parents=True)
        base = (ROOT / "experiments" / "tiny" / "config.env").read_text() if name == "tiny" else "BASE=tiny\n"
        (folder / "config.env").write_text(base + "\n".join(lines) + "\n")
        (folder / "measurements.json").write_text('{"hypothesis": "none", "baseline": null}')
    shutil.copytree(ROOT / "eval", tmp_path / "eval")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "tiny").symlink_to(ROOT / "weights" / "tiny")
    random = tmp_path / "weights" / "random"
    shutil.copytree(ROOT / "weights" / "tiny", random)
    config = json.loads((random / "config.json").read_text())
    (random / "config.json").write_text(json.dumps({**config, "random_weights": True}))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("random", "weights/random has random weights"),
        ("synthetic", "is synthetic"),
        ("dummy", "dummy weights are random"),
    ],
)
def test_every_check_of_answers_refuses(root: Path, name: str, reason: str) -> None:
    subject, run = variant.load(name, root), Invocation(["x"])
    assert speed_only.is_speed_only(subject)
    for measure in (
        lambda: quality.measure_quality(subject, None, None, run),  # type: ignore[arg-type]
        lambda: fidelity.measure_fidelity(subject, None, run),  # type: ignore[arg-type]
        lambda: acceptance.measure_acceptance(subject, None, [4], run),  # type: ignore[arg-type]
        lambda: gate.measure_gate(subject, None, command=["x"]),  # type: ignore[arg-type]
    ):
        with pytest.raises(ServingError, match=reason):
            measure()


def test_a_trained_checkpoint_whose_drafts_are_judged_is_let_through(root: Path) -> None:
    for subject in (variant.load("tiny", root), variant.load("tiny-mtp4")):
        speed_only.refuse_speed_only(subject, "quality")
        assert not speed_only.is_speed_only(subject)
