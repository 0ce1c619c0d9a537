"""What the copies are that the whole gate is shown; `make try-gate` has the engine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slimqwen import checkpoint, variant
from slimqwen.errors import SlimqwenError
from slimqwen.evaluation import gate, gate_trial
from slimqwen.evaluation.damage import Damage, DamageError
from slimqwen.evaluation.verdict import Verdict
from slimqwen.records import store
from slimqwen.report import plots
from slimqwen.variant import Variant

ROOT = Path(__file__).parents[2]


@pytest.fixture
def repository(tmp_path: Path, add_variant: Callable[..., Path]) -> Path:
    add_variant("tiny", "VLLM_MODEL=weights/tiny\nVLLM_MAX_MODEL_LEN=256\n")
    add_variant("small", "BASE=tiny\n", baseline="tiny")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "tiny").symlink_to(ROOT / "weights" / "tiny")
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "unsafe_engines.json").write_text("{}")
    return tmp_path


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Variant, str]]:
    """A gate that fails what is not the committed tiny, and remembers what it was shown."""
    shown: list[tuple[Variant, str]] = []
    records: dict[Path, dict[str, Any]] = {}

    def run(one: Variant, plan: str, **_: Any) -> Path:
        digest = checkpoint.digest(one.weights)
        shown.append((one, digest))
        verdict = Verdict.PASS if digest == checkpoint.digest(ROOT / "weights" / "tiny") else Verdict.FAIL
        (one.root / "eval" / "unsafe_engines.json").write_text('{"written": 1}')
        path = one.folder / "gate.json"
        records[path] = {"verdict": verdict, "verdicts": {"fidelity": verdict}}
        return path

    def findings(path: Path) -> list[dict[str, Any]]:
        return [
            {"gate": name, "value": 1.0, "limit": 2.0, "verdict": records[path]["verdict"]}
            for name in ("fidelity", "acceptance")
        ]

    monkeypatch.setattr(gate, "run", run)
    monkeypatch.setattr(store, "read", records.__getitem__)
    monkeypatch.setattr(store, "read_items", findings)
    return shown


def test_the_same_copy_and_one_of_each_damage_are_gated_and_nothing_is_left(
    repository: Path, gated: list[tuple[Variant, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # tiny has no scales to damage.
    monkeypatch.setattr(gate_trial, "Damage", [Damage.ROWS, Damage.HEAD])
    found = gate_trial.run(variant.load("small", repository), "tinyworld", command=["x"])
    assert [(row["damage"], row["verdict"]) for row in found["trials"]] == [
        (None, Verdict.PASS),
        (Damage.ROWS, Verdict.FAIL),
        (Damage.HEAD, Verdict.FAIL),
    ]
    assert [row["place"] for row in found["trials"]] == [None, "model.embed_tokens.weight", "mtp.fc.weight"]
    assert len({digest for _, digest in gated}) == 3
    one = gated[1][0]
    assert (one.baseline, one.settings["VLLM_MAX_MODEL_LEN"].value) == ("tiny", "256")
    assert [panel.y for panel in plots.gate_trial(found)] == [
        "mean KL (nats a token)",
        "acceptance length / baseline's",
    ]
    assert [file.name for file in (repository / "weights").iterdir()] == ["tiny"]
    assert (repository / "eval" / "unsafe_engines.json").read_text() == "{}"
    assert sorted(file.name for file in (repository / "experiments").iterdir()) == ["small", "tiny"]


def test_a_checkpoint_without_scales_cannot_be_tried_and_nothing_is_left(
    repository: Path, gated: list[tuple[Variant, str]]
) -> None:
    with pytest.raises(DamageError, match="weight_scale"):
        gate_trial.run(variant.load("small", repository), "tinyworld", command=["x"])
    assert [file.name for file in (repository / "weights").iterdir()] == ["tiny"]


def test_missing_weights_are_told_before_anything_is_made(
    repository: Path, add_variant: Callable[..., Path]
) -> None:
    add_variant("gone", "BASE=tiny\nVLLM_MODEL=weights/gone\n", baseline="tiny")
    with pytest.raises(SlimqwenError, match="weights/gone"):
        gate_trial.run(variant.load("gone", repository), "tinyworld", command=["x"])
