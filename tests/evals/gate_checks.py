"""Stand-ins for the four measurements of the gate."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import pytest

from slimqwen import variant
from slimqwen.evals import acceptance, engine, fidelity, gate, quality
from slimqwen.evals.checks import GateSettings
from slimqwen.evals.drafting import AcceptanceSettings
from slimqwen.evals.engine_process import EngineSettings
from slimqwen.evals.fidelity import Reference
from slimqwen.evals.fidelity_figures import (
    FIGURE_NAMES,
    FidelityLimits,
    FidelitySettings,
    Figures,
    judge_figures,
)
from slimqwen.evals.invocation import Invocation
from slimqwen.evals.suites.suite import Suite
from slimqwen.records import provenance
from slimqwen.records.record import Estimate
from slimqwen.records.settings import Settings
from slimqwen.serving.command import ServerCommand
from slimqwen.stats.verdict import Verdict, overall
from slimqwen.variant import Variant
from tests import record_files

ROOT = Path(__file__).parents[2]
LIMITS = FidelityLimits(**dict.fromkeys(FIGURE_NAMES, 0.003))
ONCE = Invocation(["x"])


def link_settings(root: Path) -> None:
    """Link what eval/ has into another repository; the suite tinyworld has its first task alone there."""
    (root / "eval" / "suites").mkdir(parents=True)
    for entry in (ROOT / "eval").iterdir():
        if entry.name != "suites":
            (root / "eval" / entry.name).symlink_to(entry)
    lines = (ROOT / "eval" / "suites" / "tinyworld.yaml").read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("  - "))
    (root / "eval" / "suites" / "tinyworld.yaml").write_text("\n".join(lines[: first + 1]) + "\n")


def judge(one: Variant, settings_name: str = "tinyworld") -> Path:
    """Gate a variant as its files are now; returns the record."""
    present = variant.load(one.name, one.root)
    return gate.measure_gate(present, GateSettings.load(settings_name, one.root), command=["x"])


def change_settings(one: Variant, before: str, after: str) -> None:
    """Replace a text of the gate's settings in the variant's repository."""
    file = one.root / "eval" / "gates" / "tinyworld.yaml"
    text = file.read_text()
    assert before in text
    file.parent.unlink()
    file.parent.mkdir()
    file.write_text(text.replace(before, after))


def figures_of(estimate: Estimate | None, joined_kl_nats: float | None = None) -> Figures:
    """Figures with one estimate for all."""
    counts = dict.fromkeys(("texts", "texts_compared", "positions_compared", "joined_tokens"), 9)
    return Figures(
        **dict.fromkeys(FIGURE_NAMES, estimate),
        **counts,
        head_delta_max=None,
        joined_kl_nats=joined_kl_nats,
        baseline_bits_per_byte=1.0,
    )


def split_json(invocation: Invocation) -> dict[str, Any] | None:
    """What a record says of the split that it was asked for."""
    return invocation.split and invocation.split.as_json()


class Checks:
    """Stand-ins for the four measurements: they write whole records with the figures set here, and list their calls."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.kl_nats = 0.001
        self.noise_ratio: float | None = None
        self.accepted = 8
        self.right = 200
        self.available = 800
        self.margin = 0.04
        self.runaways: int | None = None
        self.wrong: dict[tuple[str, str | None], int] = {}
        self.engine_is: Literal["fine", "wrong", "dead", "idle"] = "fine"

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put the stand-ins in the place of the measurements."""
        for module in (fidelity, acceptance, quality, engine):
            name = module.__name__.rpartition(".")[2]
            monkeypatch.setattr(module, f"measure_{name}", getattr(self, name))

    def described(
        self, one: Variant, settings: Settings, flags: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        server = ServerCommand.resolve(one)
        if flags is not None:
            server = dataclasses.replace(server, flags=flags)
        return provenance.describe(server, ["x"], provenance.utc_now(), datasets=settings.inputs(one.root))

    def fidelity(self, one: Variant, settings: FidelitySettings, invocation: Invocation = ONCE) -> Path:
        self.asked.append(("fidelity", one.name))
        estimate = Estimate(value=self.kl_nats, standard_error=1e-5, count=9)
        figures = figures_of(estimate, joined_kl_nats=self.kl_nats)
        verdicts = judge_figures(figures, LIMITS)
        unchanged, noise = None, Verdict.PASS
        if value := self.noise_ratio:
            noise = Verdict.PASS if value <= 2 else Verdict.FAIL
            unchanged = {"limit": 2, "ratios": [{
                "mode": "served", "figure": "kl_nats", "value": value, "low": value, "high": value, "p_value": 0.5,
                "verdict": noise,
            }]}  # fmt: skip
        record = {
            "schema": "fidelity/3", "variant": one.name, "baseline": one.baseline or "tiny", "plan": settings.name,
            "reference": Reference.of(one).as_json(),
            "limits": LIMITS.as_json(), "unchanged": unchanged, "modes": {"single": figures.as_json()},
            "verdicts": {"single": verdicts},
            "verdict": overall([*verdicts.values(), noise]),
            "provenance": self.described(one, settings),
            "split": split_json(invocation),
        }  # fmt: skip
        return record_files.write(invocation.records_of(one), record, [{"text": 1}])

    def acceptance(
        self,
        one: Variant,
        settings: AcceptanceSettings,
        depths: list[int],
        invocation: Invocation = ONCE,
        *,
        greedy_only: bool = True,
    ) -> Path:
        self.asked.append(("acceptance", one.name))
        accepted = self.accepted if one.name != "tiny" else 8
        items = [item for depth in depths for item in record_files.draft_items(*[[accepted] * depth] * 3)]
        rows = [row.as_json() for row in acceptance.summarise_items(items)]
        record = record_files.example("acceptance", variant=one.name, plan=settings.name)
        record |= {"gate_depth": depths[0], "depths": rows, "reference": Reference.of(one).as_json()}
        record["provenance"] = self.described(one, settings, {"enforce-eager": True})
        record["split"] = split_json(invocation)
        return record_files.write(invocation.records_of(one), record, items)

    def quality(self, one: Variant, suite: Suite, limit: Any, invocation: Invocation = ONCE) -> Path:
        self.asked.append(("quality", one.name))
        right = self.right if one.name != "tiny" else 200
        example = record_files.example("quality", variant=one.name, suite=suite.name, limit=limit)
        example["provenance"] = self.described(one, suite)
        (asked,) = suite.tasks
        task = asked.name
        counts = {"item_count": 400, "available_count": self.available}
        counts |= {"items_to_decide": asked.items_to_decide, "settings": suite.settings_of(asked)}
        score = example["tasks"]["example_facts"] | counts | {"non_inferiority_margin": self.margin}
        items = [
            {"task": task, "item": str(n), "value": float(n < right), "weight": 1, "cluster": None}
            for n in range(400)
        ]
        if self.runaways is not None:
            cut = self.runaways if one.name != "tiny" else 0
            for n, item in enumerate(items):
                item |= {"output": "iron", "truncated": n % 20 == 0 and n // 20 < cut, "looping": False}
                item |= {"output_tokens": 2, "item": f"{n:016x}"}
        return record_files.write(
            invocation.records_of(one),
            example | {"tasks": {task: score}, "split": split_json(invocation)},
            items,
        )

    def engine(self, one: Variant, settings: EngineSettings, invocation: Invocation = ONCE) -> Path:
        self.asked.append(("engine", one.name))
        wrong = {"alone": [7]} if self.engine_is == "wrong" else {}
        engine = {
            "name": "served", "draft_tokens": 4, "prefix_caching": False, "sequences": 1, "responses": 9,
            "near_ties": 1, "wrong": wrong, "cached_tokens": 0, "accepted_drafts": 0 if self.engine_is == "idle" else 5,
            "failure": "starting: SIGSEGV" if self.engine_is == "dead" else None, "seconds": 1.0,
        }  # fmt: skip
        neighbour = engine | {"name": "without drafts", "draft_tokens": 0, "wrong": {"together": [1, 2]}}
        record = {
            "schema": "engine/2", "variant": one.name, "plan": settings.name, "near_tie_nats": 0.1,
            "engines": [engine, neighbour],
            "provenance": self.described(one, settings),
        }  # fmt: skip
        return record_files.write(invocation.records_of(one), record, [{"engine": "served"}])
