"""Stand-ins for what takes minutes of an optimisation; journal, steps, proof, gate, promotion and choice are real."""

import json
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from slimqwen import host_load, variant
from slimqwen.bench import latency
from slimqwen.bench.workload import Workload
from slimqwen.checkpoint.files import carry_all
from slimqwen.evals import acceptance, engine, fidelity, promotion, quality
from slimqwen.evals.invocation import Invocation
from slimqwen.processes import local
from slimqwen.records import provenance, store
from slimqwen.search import measurements, tune
from slimqwen.search.tune.arms import UNDRAFTED
from slimqwen.search.tune.contest import Contest
from slimqwen.serving.command import ServerCommand
from slimqwen.variant import Variant
from tests import record_files
from tests.checkpoints import TINY
from tests.evals.gate_checks import Checks, link_settings
from tests.search.in_process import InProcess
from tests.search.tune.turns import K2, record_of, turn

ROOT = variant.repository_root()
TIMED = ROOT / "tests" / "report" / "templates" / "latency_2026-11-23T151649Z.json"
SIDES = {"search": "recipe", "proof": "proof", None: "gate"}


@dataclass
class Steps:
    """What the steps of an optimisation do.

    Attributes:
        stop: step in which the process ends, by `signal`; once, for each run.
        failing: check that fails, and for which variants; none fails by default.
        chosen: lines of config.env that tuning finds; empty for none.
        factor: time of a response of the variant over that of its baseline.
        is_busy: whether the host is too busy to be timed on.
    """

    root: Path
    checks: Checks = field(default_factory=Checks)
    stop: str = ""
    signal: int = signal.SIGKILL
    failing: Callable[[str, Variant], bool] = lambda check, one: False
    chosen: dict[str, str] = field(default_factory=dict)
    factor: float = 0.5
    is_busy: bool = False

    def enter(self, step: str, what: str) -> None:
        """Note what a step does in a file that outlives the process, and end the process if it is to end here."""
        with (self.root / "done.txt").open("a") as stream:
            stream.write(f"{step}: {what}\n")
        if step == self.stop:
            self.stop = ""
            os.kill(os.getpid(), self.signal)

    @property
    def done(self) -> list[str]:
        """What the steps of all runs did, a line each."""
        file = self.root / "done.txt"
        return file.read_text().splitlines() if file.is_file() else []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put the stand-ins in their places."""
        self.checks.install(monkeypatch)
        for module in (fidelity, acceptance, quality, engine):
            name = module.__name__.rpartition(".")[2]
            monkeypatch.setattr(module, f"measure_{name}", self._checked(name))
        promote = promotion.promote_variant

        def promoted(one: Variant, *others: Any) -> Any:
            self.enter("promote", one.name)
            return promote(one, *others)

        monkeypatch.setattr(promotion, "promote_variant", promoted)
        monkeypatch.setattr(local, "LocalExecutor", lambda root, *_, **__: InProcess(root))
        monkeypatch.setattr(measurements, "run_stages", self._make)
        monkeypatch.setattr(tune, "tune_variant", self._tune)
        monkeypatch.setattr(latency, "measure_latency", self._time)
        monkeypatch.setattr(store, "_stamp", self._stamp)

    def _stamp(self) -> str:
        """A day for each record: a killed run's are as many as there are files."""
        number = len(list(self.root.glob("experiments/*/*_*.json")))
        return f"{datetime(2027, 1, 1, tzinfo=UTC) + timedelta(days=number):%Y-%m-%dT%H%M%SZ}"

    def _make(self, root: Path, argument: tuple[str, int | None], _: object) -> None:
        folder = root / "weights" / argument[0]
        if not folder.is_dir():
            self.enter("recipe", f"recipe of {argument[0]}")
            folder.mkdir()
            carry_all(TINY, folder)

    def _checked(self, check: str) -> Callable[..., Path]:
        measure = getattr(self.checks, check)

        def measured(one: Variant, settings: Any, *rest: Any, **options: Any) -> Path:
            given = [each for each in (*rest, *options.values()) if isinstance(each, Invocation)]
            split = given[0].split if given else None
            self.enter(SIDES[split.side if split else None], f"{check} of {one.name}")
            self.checks.kl_nats = 0.01 if self.failing("fidelity", one) else 0.001
            self.checks.accepted = 4 if self.failing("acceptance", one) else 8
            return Path(measure(one, settings, *rest, **options))

        return measured

    def _tune(self, one: Variant, *_: object, **__: object) -> Path:
        self.enter("tune", one.name)
        self._require_idle()
        made = Contest((UNDRAFTED, K2), {})
        for number in range(3):
            made.add_turn(turn(UNDRAFTED, number, {1: 100}))
            made.add_turn(turn(K2, number, {1: 150}))
        record = record_of(made, "MTP K=2", self.chosen).model_copy(update={"variant": one.name})
        return store.write_record(one.folder, record, [{"arm": "none"}])

    def _time(self, sides: Sequence[Variant], workload: Workload, **_: object) -> list[Path]:
        self.enter("timing", " and ".join(one.name for one in sides))
        self._require_idle()
        started, paths = provenance.utc_now(), []
        template = json.loads(TIMED.read_text())
        items = [json.loads(line) for line in TIMED.with_suffix(".items.jsonl").read_text().splitlines()]
        for one, factor in zip(sides, (1.0, self.factor), strict=True):
            inputs = workload.inputs(self.root)
            block = provenance.describe(ServerCommand.resolve(one), ["x"], started, datasets=inputs)
            record = template | {"variant": one.name, "run": started, "provenance": block}
            record["interleaved_with"] = [other.name for other in sides if other is not one]
            rows = [
                row | {"e2el_ms": row["e2el_ms"] * factor * (1 + 0.02 * (-1) ** (row["round"] + number))}
                for number, row in enumerate(items)
            ]
            paths.append(record_files.write(one.folder, record, rows))
        return paths

    def _require_idle(self) -> None:
        if self.is_busy:
            error = host_load.HostBusyError("the host was too busy; end other work")
            error.cause = "other processes used 70 % of the CPU"
            raise error


def make_root(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with the baseline tiny and this one's settings; it is the present one and the working folder."""
    (root / "weights" / "store").mkdir(parents=True)
    (root / "weights" / "tiny").symlink_to(TINY)
    (root / "experiments" / "tiny").mkdir(parents=True)
    config = "VLLM_MODEL=weights/tiny\nVLLM_MAX_MODEL_LEN=256\nVLLM_MAX_NUM_SEQS=1\nEVALUATION=tinyworld\n"
    (root / "experiments" / "tiny" / "config.env").write_text(config)
    claims = {"schema": "measurements/1", "hypothesis": "As it is.", "baseline": None}
    claims |= {"status": "measured", "verdict": None, "records": []}
    (root / "experiments" / "tiny" / "measurements.json").write_text(json.dumps(claims))
    link_settings(root)
    (root / "docs").mkdir()
    for module in (variant, variant.variant, variant.scaffold):
        if hasattr(module, "repository_root"):
            monkeypatch.setattr(module, "repository_root", lambda: root)
    monkeypatch.chdir(root)
    return root
