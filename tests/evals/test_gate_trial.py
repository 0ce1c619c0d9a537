"""What the copies are that the whole gate is shown; `slimqwen gate trial` runs it with engines."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slimqwen import checkpoint, variant
from slimqwen.errors import SlimqwenError
from slimqwen.evals import EvalError, gate, gate_trial
from slimqwen.evals.damage import Damage
from slimqwen.evals.gate_trial import GateTrial
from slimqwen.records import store
from slimqwen.stats.verdict import Verdict
from slimqwen.variant import Variant
from tests import record_files

ROOT = Path(__file__).parents[2]
EXAMPLE = record_files.example("quality")


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
    """A gate that fails what is not the committed tiny; lists the variants and checkpoints that it was run on."""
    runs: list[tuple[Variant, str]] = []

    def measure(one: Variant, settings_name: str, **_: Any) -> Path:
        digest = checkpoint.digest(one.weights)
        runs.append((one, digest))
        verdict = Verdict.PASS if digest == checkpoint.digest(ROOT / "weights" / "tiny") else Verdict.FAIL
        (one.root / "eval" / "unsafe_engines.json").write_text('{"written": 1}')
        record = {
            "schema": "gate/1", "variant": one.name, "baseline": "tiny", "plan": settings_name, "verdict": verdict,
            "verdicts": dict.fromkeys(gate.CHECKS, verdict), "records": ["small/x.json"],
            "provenance": EXAMPLE["provenance"],
        }  # fmt: skip
        findings = [
            {"gate": name, "figure": "f", "value": 1.0, "low": None, "high": None, "limit": 2.0, "verdict": verdict}
            for name in ("fidelity", "acceptance")
        ]  # fmt: skip
        return record_files.write(one.folder, record, findings)

    monkeypatch.setattr(gate, "measure", measure)
    return runs


def test_the_same_copy_and_one_of_each_damage_are_gated_and_nothing_is_left(
    repository: Path, gated: list[tuple[Variant, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # tiny has no scales to damage.
    monkeypatch.setattr(gate_trial, "Damage", [Damage.ROWS, Damage.HEAD])
    path = gate_trial.measure(variant.load("small", repository), "tinyworld", command=["x"])
    record = store.read(path, GateTrial)
    assert [(row.damage, row.target, row.verdict) for row in record.trials] == [
        (None, None, Verdict.PASS),
        (Damage.ROWS, "model.embed_tokens.weight", Verdict.FAIL),
        (Damage.HEAD, "mtp.fc.weight", Verdict.FAIL),
    ]
    assert record.verdict == Verdict.PASS
    assert [row[0] for row in record.tables(path)[0].rows] == ["identical", Damage.ROWS, Damage.HEAD]
    assert len({digest for _, digest in gated}) == 3
    one = gated[1][0]
    assert (one.baseline, one.settings["VLLM_MAX_MODEL_LEN"].value) == ("tiny", "256")
    assert [file.name for file in (repository / "weights").iterdir()] == ["tiny"]
    assert (repository / "eval" / "unsafe_engines.json").read_text() == "{}"
    assert sorted(file.name for file in (repository / "experiments").iterdir()) == ["small", "tiny"]


def test_a_checkpoint_without_scales_cannot_be_tried_and_nothing_is_left(
    repository: Path, gated: list[tuple[Variant, str]]
) -> None:
    with pytest.raises(EvalError, match="weight_scale"):
        gate_trial.measure(variant.load("small", repository), "tinyworld", command=["x"])
    assert [file.name for file in (repository / "weights").iterdir()] == ["tiny"]


def test_missing_weights_are_told_before_anything_is_made(
    repository: Path, add_variant: Callable[..., Path]
) -> None:
    add_variant("gone", "BASE=tiny\nVLLM_MODEL=weights/gone\n", baseline="tiny")
    with pytest.raises(SlimqwenError, match="weights/gone"):
        gate_trial.measure(variant.load("gone", repository), "tinyworld", command=["x"])
