"""The checks: which records hold, their settings, and a fifth."""

import importlib
from collections.abc import Callable

import pytest

from slimqwen.evals import EvalError
from slimqwen.evals import checks as gate_checks
from slimqwen.evals.checks import GateSettings
from slimqwen.evals.checks.quality import QualitySettings
from slimqwen.evals.drafting import AcceptanceSettings
from slimqwen.evals.engine_process import EngineSettings
from slimqwen.evals.fidelity_figures import FidelitySettings
from slimqwen.evals.gate import Gate
from slimqwen.evals.promotion import promote_variant
from slimqwen.records import store
from slimqwen.records.settings import SettingsError
from slimqwen.search.measurements import RecordSettings, check_task
from slimqwen.text import prompts
from slimqwen.text.corpus import resolve_text
from slimqwen.variant import Variant
from tests.evals.gate_checks import ROOT, Checks, change_settings, judge


def test_what_holds_is_not_measured_again(one: Variant, checks: Checks) -> None:
    judge(one)
    checks.asked.clear()
    judge(one)
    assert checks.asked == []
    config = one.weights / "config.json"
    config.write_text(config.read_text() + "\n")
    judge(one)
    assert checks.asked == [(name, "small") for name in ("fidelity", "acceptance", "quality", "engine")]
    checks.asked.clear()
    settings = one.folder / "config.env"
    settings.write_text(settings.read_text() + "VLLM_MAX_NUM_SEQS=3\n")
    judge(one)
    # Acceptance is of the weights; how many requests are served at once is for the other three.
    assert checks.asked == [("fidelity", "small"), ("quality", "small"), ("engine", "small")]


def test_every_suite_has_a_gate_of_its_name() -> None:
    """`gate` judges a variant by the settings that EVALUATION names, which names its suite too."""
    for name in (path.stem for path in (ROOT / "eval" / "suites").glob("*.yaml")):
        settings = GateSettings.load(name, ROOT)
        assert settings.of(QualitySettings).suite == name
        assert len(settings.of(FidelitySettings).read_texts(ROOT)) > 20
        assert resolve_text(settings.of(EngineSettings).text, ROOT).is_file()
        assert len(list(prompts.documents(settings.of(AcceptanceSettings).documents, 0, ROOT))) > 20


ENERGY = '''
"""The check energy: joules of a generated token."""

from dataclasses import dataclass
from typing import ClassVar

from slimqwen.evals.checks.check import Check
from slimqwen.records import provenance, store
from slimqwen.records.record import Finding, NonNegative, ServedRecord, Verdict
from slimqwen.records.settings import Settings, SettingsName
from slimqwen.serving.command import ServerCommand


class EnergySettings(Settings):
    folder, section, own_file = "gates", "energy", "gate"

    most_joules: float


class Energy(ServedRecord):
    kind: ClassVar = "energy"

    settings_name: SettingsName
    joules: NonNegative


@dataclass(frozen=True)
class EnergyCheck(Check[EnergySettings]):
    name, kind, settings_type, measures_baseline = "energy", Energy, EnergySettings, False

    @staticmethod
    def input_readers(settings, variant):
        return []

    def measure(self, side):
        made = provenance.describe(
            ServerCommand.resolve(side), ["x"], provenance.utc_now(), datasets=self.inputs()
        )
        record = Energy(variant=side.name, settings_name=self.settings.name, joules=0.5, provenance=made)
        return store.write_record(self.pair.invocation.records_of(side), record, [{"token": 1}])

    def findings(self, paths):
        value, limit = store.read_record(paths[0], Energy).joules, self.settings.most_joules
        verdict = Verdict.PASS if value <= limit else Verdict.FAIL
        yield Finding(gate=self.name, figure="joules a token", value=value, limit=limit, verdict=verdict)
'''


def test_a_fifth_check_is_one_module_and_one_row(
    one: Variant, checks: Checks, add_module: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gate, promotion, own evaluations and the tasks of demo and proof have it without a change elsewhere."""
    before = judge(one)
    file = one.root / "eval" / "gates" / "tinyworld.yaml"
    change_settings(one, "engine: #", "energy: {most_joules: 1}\nengine: #")
    with pytest.raises(SettingsError, match=r"unknown key 'energy'"):
        judge(one)
    add_module(gate_checks, "energy", ENERGY)
    energy = importlib.import_module("slimqwen.evals.checks.energy")
    monkeypatch.setattr(gate_checks, "CHECKS", (*gate_checks.CHECKS, energy.EnergyCheck))
    with pytest.raises(EvalError, match=rf"{before.name}, has other data files and checks\)"):
        promote_variant(one)
    path = judge(one)
    record = store.read_record(path, Gate)
    assert record.verdicts["energy"] == record.verdict == "pass"
    (cited,) = (each for each in record.evidence(one.root / "experiments") if each.name.startswith("energy_"))
    assert store.read_record(cited, energy.Energy).joules == 0.5
    assert ("energy", "joules a token", "0.5", "-", "1", "pass") in record.tables(path)[0].rows
    assert promote_variant(one).gate == path

    judged = one.with_lines({"EVALUATION": "tinyworld"})
    task = check_task(RecordSettings(("x",)).load_checks(judged)["energy"], judged, RecordSettings(("x",)))
    assert (task.title, task.resources.whole_node) == ("energy of small", False)

    file.write_text(file.read_text().replace("most_joules: 1", "most_joules: 0.1"))
    failed = store.read_record(judge(one), Gate)
    assert (failed.verdicts["energy"], failed.verdicts["engine"]) == ("fail", "pass")
    assert failed.changed_limits == ("joules a token: 1 at first, 0.1 now",)
    file.write_text(file.read_text().replace("most_joules: 0.1", "most_joule: 0.1"))
    with pytest.raises(SettingsError, match="unknown key 'most_joule'; did you mean most_joules"):
        judge(one)
