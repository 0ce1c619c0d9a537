"""The bookkeeping of damages and false alarms; `make test-gates` has the engine and the seeds."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slimqwen import variant
from slimqwen.evaluation import acceptance, comparison, fidelity, gate, gate_power
from slimqwen.evaluation.damage import Damage
from slimqwen.evaluation.fidelity import Reading
from slimqwen.evaluation.gate_power import GatePowerError
from slimqwen.evaluation.verdict import Verdict
from slimqwen.records import store
from slimqwen.report import plots

ROOT = Path(__file__).parents[2]
PLAN = gate.Plan(fidelity="tinyworld", acceptance="tinyworld", quality="tinyworld", engine="tinyworld")


@pytest.fixture
def repository(tmp_path: Path, add_variant: Callable[..., Path]) -> Path:
    add_variant("tiny", "VLLM_MODEL=weights/tiny\nVLLM_MAX_MODEL_LEN=256\n")
    add_variant("small", "BASE=tiny\n", baseline="tiny")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "tiny").symlink_to(ROOT / "weights" / "tiny")
    (tmp_path / "eval").symlink_to(ROOT / "eval")
    return tmp_path


def test_every_seed_of_every_damage_is_shown_to_the_gate_responsible(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[str, Path]] = []

    def witness(name: str, limit: float) -> Callable[..., Callable[[Path], tuple[float, Verdict]]]:
        def look(folder: Path) -> tuple[float, Verdict]:
            shown.append((name, folder))
            value = float((folder / "damage").read_text()) if (folder / "damage").exists() else 0.0
            return value, Verdict.FAIL if value > limit else Verdict.PASS

        return lambda *_: look

    def write(source: Path, destination: Path, kind: Damage, seed: int) -> str:
        (destination / "damage").write_text(str(seed))
        return f"{kind} {seed}"

    monkeypatch.setattr(gate_power, "_fidelity_witness", witness("fidelity", 0.5))
    monkeypatch.setattr(gate_power, "_acceptance_witness", witness("acceptance", 1.5))
    monkeypatch.setattr(gate_power, "false_alarms", lambda *_: [])
    monkeypatch.setattr(gate_power.damage, "damage", write)
    found = gate_power.examine(variant.load("small", repository), "tinyworld", range(3), None)
    assert {row["damage"]: (row["gate"], row["caught"], row["of"]) for row in found["damages"]} == {
        Damage.SCALES: ("fidelity", 2, 3),
        Damage.ROWS: ("fidelity", 2, 3),
        Damage.HEAD: ("acceptance", 1, 3),
    }
    assert found["undamaged"]["fidelity"] == {"value": 0.0, "verdict": Verdict.PASS}
    assert len(shown) == 2 + 3 * 3
    panels = plots.gate_power(json.loads(json.dumps(found)))
    assert [line.label for line in panels[0].lines] == [Damage.SCALES, Damage.ROWS, "undamaged"]
    with pytest.raises(GatePowerError, match="tiny has no baseline"):
        gate_power.examine(variant.load("tiny", repository), "tinyworld", [0], None)


def test_what_an_interrupted_run_has_shown_a_gate_is_not_shown_again(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []

    def look(folder: Path) -> tuple[float, Verdict]:
        shown.append(folder.name)
        if len(shown) == 5:
            raise KeyboardInterrupt
        return float(len(shown)), Verdict.FAIL

    monkeypatch.setattr(gate_power, "_fidelity_witness", lambda *_: look)
    monkeypatch.setattr(gate_power, "_acceptance_witness", lambda *_: look)
    monkeypatch.setattr(gate_power, "false_alarms", lambda *_: [])
    monkeypatch.setattr(gate_power.damage, "damage", lambda *_: "what")
    one = variant.load("small", repository)
    with pytest.raises(KeyboardInterrupt):
        gate_power.examine(one, "tinyworld", range(2), None)
    found = gate_power.examine(one, "tinyworld", range(2), None)
    # Two undamaged, three kinds of two seeds; the fifth look was cut off and made again.
    assert len(shown) == 9
    assert [row["value"] for row in found["damages"][0]["rows"]] == [3.0, 4.0]
    gate_power.examine(one, "tinyworld", range(2), None)
    assert len(shown) == 17


def readings(kl_nats: Sequence[float]) -> list[Reading]:
    """Texts of 100 positions with a divergence a position each, the same in every mode."""
    return [
        Reading(
            f"text {n}",
            mode,
            400,
            100,
            kl_nats=100 * kl,
            baseline_bits=100.0,
            variant_bits=100.0,
            head_deltas=[0.001] * 9,
        )
        for mode in fidelity.MODES
        for n, kl in enumerate(kl_nats)
    ]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> int:
    """Replicates, for each takes bootstraps of its own."""
    monkeypatch.setattr(gate_power, "REPLICATES", 10)
    return 10


@pytest.mark.parametrize(("kl_nats", "fails"), [(1e-5, False), (1e-2, True)])
def test_false_alarms_are_failures_of_the_baseline_against_itself(
    repository: Path, monkeypatch: pytest.MonkeyPatch, few: int, kl_nats: float, fails: bool
) -> None:
    chance = np.random.default_rng(0)
    noise = kl_nats * chance.uniform(0.5, 1.5, size=12)
    monkeypatch.setattr(fidelity, "compare", lambda *_, **__: readings(list(noise)))

    def counted(*arguments: Any) -> list[dict[str, Any]]:
        return [
            {"depth": 4, "class": "short", "temperature": 0.0, "group": group, "drafts": 10,
             "accepted_per_position": [8, 7, 6, 5]}
            for group in range(6)
        ]  # fmt: skip

    monkeypatch.setattr(acceptance, "cut_prompts", lambda *_: {})
    monkeypatch.setattr(acceptance, "count", counted)
    found = {
        row["gate"]: row for row in gate_power.false_alarms(variant.load("tiny", repository), PLAN, None)
    }
    assert set(found) == {"fidelity", "acceptance"}
    assert found["fidelity"]["failed"] == (few if fails else 0)
    assert found["fidelity"]["verdict"] == (Verdict.FAIL if fails else Verdict.PASS)
    assert (found["acceptance"]["failed"], found["acceptance"]["rate"]) == (0, 0.0)


@pytest.mark.usefixtures("few")
def test_quality_is_resampled_by_item(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two variants of the same weights, half of whose answers were lost on the way, every replicate fails."""
    example = json.loads((ROOT / "tests" / "records" / "data" / "quality.json").read_text())
    task = next(iter(example["tasks"]))
    body = example | {"tasks": {task: example["tasks"][task]}}
    for name, lost in (("tiny", 0), ("small", 2)):
        items = [
            {"task": task, "item": str(n), "value": float(not lost or n % lost), "weight": 1}
            for n in range(200)
        ]
        store.write(repository / "experiments" / name, body | {"variant": name}, items)
    monkeypatch.setattr(fidelity, "compare", lambda *_, **__: readings([1e-5] * 12))
    monkeypatch.setattr(acceptance, "cut_prompts", lambda *_: {})
    groups = [
        {
            "depth": 4,
            "class": "short",
            "temperature": 0.0,
            "group": n,
            "drafts": 9,
            "accepted_per_position": [5] * 4,
        }
        for n in range(4)
    ]
    monkeypatch.setattr(acceptance, "count", lambda *_: groups)
    tiny, small = (variant.load(name, repository) for name in ("tiny", "small"))
    by_gate = {row["gate"]: row for row in gate_power.false_alarms(tiny, PLAN, small)}
    assert by_gate["quality"]["rate"] == 1.0
    assert comparison.by_task(next(store.records(tiny.folder, "quality"))).keys() == {task}
