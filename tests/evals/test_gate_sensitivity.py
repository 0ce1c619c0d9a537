"""Bookkeeping of damages and false alarms; `slimqwen gate sensitivity` has the engine and the seeds."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from slimqwen import variant
from slimqwen.evals import EvalError, drafting, gate_sensitivity, token_distributions
from slimqwen.evals.damage import Damage
from slimqwen.evals.drafting import AcceptanceSettings
from slimqwen.evals.fidelity_figures import MODES, FidelitySettings, TextComparison
from slimqwen.evals.gate_sensitivity import GatePower, Reading
from slimqwen.records import store
from slimqwen.stats.verdict import Verdict
from slimqwen.variant import Variant
from tests import record_files

ROOT = Path(__file__).parents[2]
SETTINGS = FidelitySettings.load("tinyworld", ROOT), AcceptanceSettings.load("tinyworld", ROOT)
Check = Callable[[Path], Reading]


@pytest.fixture
def repository(tmp_path: Path, add_variant: Callable[..., Path]) -> Path:
    add_variant("tiny", "VLLM_MODEL=weights/tiny\nVLLM_MAX_MODEL_LEN=256\n")
    add_variant("small", "BASE=tiny\n", baseline="tiny")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "tiny").symlink_to(ROOT / "weights" / "tiny")
    (tmp_path / "eval").symlink_to(ROOT / "eval")
    return tmp_path


@pytest.fixture
def measured(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[int, Check, Check], tuple[Path, GatePower]]:
    """Measure with stand-ins for the two checks and for the damage, which writes its seed into a file."""

    def damage(source: Path, destination: Path, kind: Damage, seed: int) -> str:
        (destination / "damage").write_text(str(seed))
        return f"{kind} {seed}"

    def measure(seeds: int, fidelity: Check, acceptance: Check) -> tuple[Path, GatePower]:
        monkeypatch.setattr(gate_sensitivity, "_fidelity_check", lambda *_: fidelity)
        monkeypatch.setattr(gate_sensitivity, "_acceptance_check", lambda *_: acceptance)
        monkeypatch.setattr(gate_sensitivity, "false_alarms", lambda *_: [])
        monkeypatch.setattr(gate_sensitivity.damage, "damage", damage)
        monkeypatch.setattr(store, "publish", lambda path, content, **_: path.write_bytes(content))
        one = variant.load("small", repository)
        path = gate_sensitivity.measure(one, "tinyworld", range(seeds), None, command=["x"])
        return path, store.read(path, GatePower)

    return measure


def test_the_check_responsible_for_a_damage_sees_every_damaged_copy(
    measured: Callable[..., tuple[Path, GatePower]],
) -> None:
    checked: list[Path] = []

    def check(limit: float) -> Check:
        def read_damage(weights: Path) -> Reading:
            checked.append(weights)
            value = float((weights / "damage").read_text()) if (weights / "damage").exists() else 0.0
            return Reading(value=value, verdict=Verdict.FAIL if value > limit else Verdict.PASS)

        return read_damage

    path, record = measured(3, check(0.5), check(1.5))
    assert {row.damage: (row.gate, row.caught, row.copies) for row in record.damages} == {
        Damage.SCALES: ("fidelity", 2, 3),
        Damage.ROWS: ("fidelity", 2, 3),
        Damage.HEAD: ("acceptance", 1, 3),
    }
    assert record.undamaged["fidelity"] == Reading(value=0.0, verdict=Verdict.PASS)
    assert record.verdict == Verdict.FAIL
    assert len(checked) == 2 + 3 * 3
    assert [row[2:6] for row in record.tables(path)[0].rows][2] == ("1", "3", "0.00000", "2.00000")


def test_a_baseline_has_no_gate(repository: Path) -> None:
    with pytest.raises(EvalError, match="tiny has no baseline"):
        gate_sensitivity.measure(variant.load("tiny", repository), "tinyworld", [0], None, command=["x"])


def test_copies_that_an_interrupted_run_has_checked_are_not_checked_again(
    measured: Callable[..., tuple[Path, GatePower]],
) -> None:
    checked: list[str] = []

    def check(weights: Path) -> Reading:
        checked.append(weights.name)
        if len(checked) == 5:
            raise KeyboardInterrupt
        return Reading(value=len(checked), verdict=Verdict.FAIL)

    with pytest.raises(KeyboardInterrupt):
        measured(2, check, check)
    _, record = measured(2, check, check)
    # Two undamaged, three kinds of two seeds; the fifth check was cut off and made again.
    assert len(checked) == 9
    assert [row.value for row in record.damages[0].rows] == [3.0, 4.0]
    measured(2, check, check)
    assert len(checked) == 17


@pytest.fixture
def baseline(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Variant]:
    """The baseline, its texts diverging from themselves so much, with few replicates and groups of drafts."""
    monkeypatch.setattr(gate_sensitivity, "REPLICATES", 10)  # each takes bootstraps of its own
    monkeypatch.setattr(drafting, "cut_prompts", lambda *_: {})
    drafts = record_files.draft_items(*[[8, 7, 6, 5]] * 6)
    monkeypatch.setattr(drafting, "count", lambda *_: drafts)

    def diverging(kl_nats: float) -> Variant:
        noise = kl_nats * np.random.default_rng(0).uniform(0.5, 1.5, size=12)
        sums = {"baseline_bits": 100.0, "variant_bits": 100.0, "head_deltas": [0.001] * 9}
        texts = [
            TextComparison(f"text {number}", mode, 400, 100, kl_nats=100 * kl, **sums)
            for mode in MODES
            for number, kl in enumerate(noise)
        ]
        monkeypatch.setattr(token_distributions, "compare", lambda *_, **__: texts)
        return variant.load("tiny", repository)

    return diverging


@pytest.mark.parametrize(
    ("kl_nats", "failed", "verdict"), [(1e-5, 0, Verdict.PASS), (1e-2, 10, Verdict.FAIL)]
)
def test_false_alarms_are_failures_of_the_baseline_against_itself(
    baseline: Callable[[float], Variant], kl_nats: float, failed: int, verdict: Verdict
) -> None:
    alarms = {row.gate: row for row in gate_sensitivity.false_alarms(baseline(kl_nats), *SETTINGS, None)}
    assert set(alarms) == {"fidelity", "acceptance"}
    assert (alarms["fidelity"].failed, alarms["fidelity"].verdict) == (failed, verdict)
    assert (alarms["acceptance"].failed, alarms["acceptance"].rate) == (0, 0.0)


def test_quality_is_resampled_by_item(repository: Path, baseline: Callable[[float], Variant]) -> None:
    """Of two variants of the same weights, half of whose answers were lost on the way, every replicate fails."""
    example = record_files.example("quality")
    task = next(iter(example["tasks"]))
    body = example | {"tasks": {task: example["tasks"][task]}}
    for name, lost in (("tiny", 0), ("small", 2)):
        items = [
            {"task": task, "item": str(n), "value": float(not lost or n % lost), "weight": 1}
            for n in range(200)
        ]
        record_files.write(repository / "experiments" / name, body | {"variant": name}, items)
    alarms = gate_sensitivity.false_alarms(baseline(1e-5), *SETTINGS, variant.load("small", repository))
    assert {row.gate: row.rate for row in alarms}["quality"] == 1.0
