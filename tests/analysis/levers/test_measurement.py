"""The order of turns, ratios paired by round, busy machines, an interrupted run, and what the record shows."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slimqwen import host_load, variant
from slimqwen.analysis.levers import device, measurement, turns
from slimqwen.analysis.levers.record import Levers
from slimqwen.analysis.levers.turns import TurnError
from slimqwen.host_load import HostBusyError, HostLoad
from slimqwen.records import store

ROOT = Path(__file__).parents[3]
SPECULATION = (
    '{"method": "mtp", "num_speculative_tokens": 4, "rejection_sample_method": "synthetic", '
    '"synthetic_acceptance_length": 3.4}'
)
RATES = {f"{kind}_{tokens}": 2e9 for kind in ("bf16", "int8", "int4") for tokens in (1, 5)}


class Machine:
    """Answers instead of worker processes.

    Attributes:
        asked: checkpoint of every turn, "cpu" for the measurement of products.
        busy: turns that find other work on the machine.
        killed: number of the turn at which the run is interrupted.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.busy: set[int] = set()
        self.killed: int | None = None

    def __call__(
        self, function: Any, weights: Path, task: Any, **options: Any
    ) -> tuple[dict[str, float], HostLoad]:
        if function is device.measure:
            assert task == [1, 5]
            self.asked.append("cpu")
            return {"copy": 3e9, "peak": 1e12, **RATES}, load(0.0)
        drafts = bool(task.flags.get("speculative-config"))
        number = len(self.asked)
        if number == self.killed:
            raise KeyboardInterrupt
        self.asked.append(f"{weights.name}{' drafts' if drafts else ''}")
        # A later round is slower, for both sides alike.
        step_s = (0.03 if drafts else 0.02) * (1 + number / 100)
        figures = {
            "steps": 20.0,
            "tokens": 66.0 if drafts else 20.0,
            "seconds": 20 * step_s,
            "memory": 1e9,
        }
        return figures, load(0.5 if number in self.busy else 0.0)


def load(other_share: float) -> HostLoad:
    return HostLoad(
        seconds=2.0, other_share=other_share, pressure=0.1, client_delay_ms=None, server_delay_ms=None
    )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(host_load, "LIMITS", host_load.Limits(0.2, 5.0, 5.0))
    monkeypatch.setattr(turns, "in_worker", made)
    return made


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, base, lines in (
        ("tiny", (ROOT / "experiments" / "tiny" / "config.env").read_text(), ""),
        ("drafting", "BASE=tiny\n", f"VLLM_SPECULATIVE_CONFIG='{SPECULATION}'\n"),
    ):
        folder = tmp_path / "experiments" / name
        folder.mkdir(parents=True)
        (folder / "config.env").write_text(base + lines)
        (folder / "measurements.json").write_text('{"hypothesis": "none", "baseline": null}')
    (tmp_path / "weights").mkdir()
    shutil.copytree(ROOT / "weights" / "tiny", tmp_path / "weights" / "tiny")
    return tmp_path


def measured(
    root: Path, names: Sequence[str] = ("tiny", "drafting"), rounds: int = 3, even_if_busy: bool = False
) -> Levers:
    path = measurement.write(
        [variant.load(name, root) for name in names],
        rounds=rounds,
        prompt_tokens=32,
        output_tokens=96,
        command=["slimqwen", "analyze", "levers"],
        even_if_busy=even_if_busy,
    )
    return store.read(path, Levers)


def test_the_cpu_comes_first_then_every_variant_once_a_round(root: Path, machine: Machine) -> None:
    measured(root)
    narrow = "narrow-4-layers"
    assert machine.asked == ["cpu", narrow, f"{narrow} drafts", *["tiny", "tiny drafts"] * 3]


def test_ratios_are_paired_by_round_and_speed_is_the_set_length_over_the_step(
    root: Path, machine: Machine
) -> None:
    record = measured(root)
    first, drafting = record.arms
    assert first.step_ratio.value == first.speed_up.value == first.predicted_step_ratio == 1
    memory_rate = record.cpu.memory_bandwidth_gb_per_s * 1e9
    assert first.roofline_ms == pytest.approx(1e3 * first.bytes_per_step / memory_rate)
    expected = [0.03 * (1 + n / 100) / (0.02 * (1 + (n - 1) / 100)) for n in (4, 6, 8)]
    assert min(expected) <= drafting.step_ratio.value <= max(expected)
    assert drafting.acceptance_length == 3.4
    assert drafting.acceptance_is_set
    assert drafting.counted_acceptance_length == (3.3, 3.3, 3.3)
    assert drafting.speed_up.value == pytest.approx(3.4 / drafting.step_ratio.value)
    error = drafting.predicted_step_ratio / drafting.step_ratio.value - 1
    assert drafting.prediction_error == pytest.approx(error)


def test_a_turn_beside_other_work_is_taken_again(root: Path, machine: Machine) -> None:
    machine.busy = {4, 5}
    record = measured(root)
    assert record.repeated_turns == record.provenance.host_load.repeated == 2
    assert not record.provenance.host_was_busy
    assert len(machine.asked) == 3 + 6 + 2


def test_a_machine_that_stays_busy_gives_no_record_and_the_command_goes_on_from_there(
    root: Path, machine: Machine
) -> None:
    machine.busy = set(range(6, 9))
    with pytest.raises(HostBusyError, match=r"others took 50\.0%.*; the same command continues from there"):
        measured(root)
    assert not (root / "results").exists()
    machine.busy, count = set(), len(machine.asked)
    measured(root)
    assert len(machine.asked) - count == 6 - 3


def test_figures_of_a_busy_host_are_marked_and_no_later_run_takes_them(root: Path, machine: Machine) -> None:
    machine.busy = set(range(6, 30))
    assert measured(root, even_if_busy=True).provenance.host_was_busy
    with pytest.raises(HostBusyError):
        measured(root)


def test_an_interrupted_run_goes_on_where_it_stopped(root: Path, machine: Machine) -> None:
    machine.killed = 6
    with pytest.raises(KeyboardInterrupt):
        measured(root)
    machine.killed = None
    assert len(measured(root).arms[0].step_ms) == 3
    assert machine.asked.count("cpu") == 1
    assert len(machine.asked) == 3 + 6


def test_one_variant_or_one_round_is_refused(root: Path) -> None:
    with pytest.raises(TurnError, match="two variants and two rounds"):
        measured(root, ["tiny"])
    with pytest.raises(TurnError, match="two variants and two rounds"):
        measured(root, rounds=1)


def test_a_variant_that_compiles_is_refused() -> None:
    tiny = variant.load("tiny")
    compiles = variant.Setting("VLLM_ENFORCE_EAGER", "0", tiny.folder / "config.env", 1)
    with pytest.raises(TurnError, match="compiles"):
        measurement.Side.load(replace(tiny, settings={**tiny.settings, "VLLM_ENFORCE_EAGER": compiles}))


def test_the_table_shows_predicted_beside_measured_and_names_the_largest_error(
    root: Path, machine: Machine
) -> None:
    record = measured(root)
    steps, terms = record.tables(root / "results" / "levers_x.json")
    assert steps.rows[1][0] == "drafting"
    assert any("Largest error of a predicted step ratio: drafting" in note for note in steps.notes)
    assert [row[0] for row in terms.rows] == ["tiny", "drafting"]
