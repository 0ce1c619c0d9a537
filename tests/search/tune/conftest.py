"""A repository with a variant of the embedded checkpoint, prompts of its own, and servers that stand in for vLLM's."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from slimqwen import variant
from slimqwen.bench.latency.measured_variant import MeasuredVariant
from slimqwen.evals.engine_process import Response, run_reference
from slimqwen.plan.facts import Plan
from slimqwen.search.tune import preparation, tuner
from slimqwen.search.tune.arms import KEY, UNDRAFTED, Arm
from slimqwen.search.tune.contest import LoadTurn
from slimqwen.serving.shared_server import SharedServer
from slimqwen.variant import Variant
from tests.plan import example
from tests.search.tune.turns import PLANTED
from tests.stand_in import MAX_MODEL_LEN, StandIn

ROOT = Path(__file__).parents[3]
PROMPTS = (
    "the fox of the town sells salt",
    "what sells the town",
    "wool and iron are sold",
    "who sells wool",
)


@pytest.fixture
def subject(add_variant: Callable[..., Path], tmp_path: Path) -> Variant:
    """The variant v, served one request at a time."""
    lines = f"VLLM_MAX_MODEL_LEN={MAX_MODEL_LEN}\nVLLM_MAX_NUM_SEQS=1\nVLLM_CPU_KVCACHE_SPACE=1\nEVALUATION=mine\n"
    add_variant("v", f"VLLM_MODEL=weights/v\nVLLM_HOST=127.0.0.1\n{lines}")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "v").symlink_to(ROOT / "weights" / "tiny")
    own = tmp_path / "eval" / "own" / "mine"
    own.mkdir(parents=True)
    own.joinpath("prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": each, "output_tokens": 4}) + "\n" for each in PROMPTS)
    )
    for name in ("own.yaml", "gates", "known_trouble.yaml", "workloads"):
        (tmp_path / "eval" / name).symlink_to(ROOT / "eval" / name)
    return variant.load("v", tmp_path)


def name_arm(one: Variant) -> str:
    """The arm whose lines a variant has."""
    lines = {key: setting.value for key, setting in one.settings.items()}
    arm = Arm(json.loads(lines[KEY])) if KEY in lines else UNDRAFTED
    return replace(arm, parts=tuple(each for each in PLANTED if each.lines.items() <= lines.items())).name


class Servers:
    """Stand-ins by the name of the arm that they serve, and how fast they seem: a busy host decides nothing.

    Attributes:
        speeds: times as fast as a stand-in of speed 1, by the name of the arm.
        refused: what vLLM says about an arm in its plan, by its name.
        starts: names of the arms in the order of their starts.
        interrupt_at: number of the start at which the measurement is interrupted.
    """

    def __init__(self, start: Callable[..., StandIn]) -> None:
        self._start, self._read_load = start, tuner._read_load
        self.by_arm: dict[str, StandIn] = {}
        self.speeds: dict[str, float] = {}
        self.refused: dict[str, str] = {}
        self.starts: list[str] = []
        self.interrupt_at: int | None = None

    def add(self, arm: Arm, speed: float = 1.0, *, token: int = 5, lives_for: int | None = None) -> None:
        """Have an arm served by a stand-in."""
        self.by_arm[arm.name] = self._start(lives_for)
        self.by_arm[arm.name].token = token
        self.speeds[arm.name] = speed

    def read_load(self, side: MeasuredVariant, load: int | str) -> LoadTurn:
        """In the place of the tuner's: what the requests took at the speed of their arm."""
        made, speed = self._read_load(side, load), self.speeds[name_arm(side.variant)]
        times = {
            "ttft_ms": tuple(10 / speed for _ in made.ttft_ms),
            "e2el_ms": tuple(50 / speed for _ in made.ttft_ms),
        }
        return made.model_copy(
            update={"seconds": 1 / (speed * (load if isinstance(load, int) else 1)), **times}
        )

    @contextlib.contextmanager
    def share_server(self, one: Variant, **_: Any) -> Iterator[SharedServer]:
        """In the place of `serving.shared_server.share_server`."""
        name = name_arm(one)
        if len(self.starts) == self.interrupt_at:
            raise KeyboardInterrupt
        self.starts.append(name)
        url = self.by_arm[name].base_url
        running = SimpleNamespace(
            pid=os.getpid(), base_url=url, model="default", weights=one.weights, log=None
        )
        yield SharedServer(one, running, False, MAX_MODEL_LEN)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def processes(self, server: Any, timeout_s: float, log: Path) -> Iterator[Any]:
        """In the place of `EngineProcesses.started`: an engine that responds with token 5 and is sure of it."""

        def run(function: Any, task: Any, *_: Any) -> Any:
            assert function is run_reference
            counts = [request.output_tokens for request in task[1]]
            return [Response((5,) * count, ({5: -0.01, 6: -5.0},) * count) for count in counts], 0.01

        yield SimpleNamespace(server=server, log=log, run=run)

    def plan(self, variants: Sequence[Variant], gpu: None, *, log: Path) -> Iterator[Plan]:
        """In the place of `rehearsal.rehearse_variants`."""
        for each in variants:
            yield example.plan(gpu="cpu", capability=None, error=self.refused.get(name_arm(each)))


@pytest.fixture
def few_responses(subject: Variant) -> None:
    """Fewer responses are compared than a real engine's noise needs."""
    gates = subject.root / "eval" / "gates"
    gates.unlink()
    gates.mkdir()
    gate = yaml.safe_load((ROOT / "eval" / "gates" / "tinyworld.yaml").read_text())
    gate["engine"] |= {"lengths": 4, "output_tokens": 6}
    gates.joinpath("tinyworld.yaml").write_text(yaml.safe_dump(gate))


@pytest.fixture
def servers(stand_in: Callable[..., StandIn], monkeypatch: pytest.MonkeyPatch) -> Servers:
    """Stand-ins in the place of servers and engines; its test adds one for each arm, all of which are tried."""
    made = Servers(stand_in)
    monkeypatch.setattr(tuner, "share_server", made.share_server)
    monkeypatch.setattr(tuner, "_read_load", made.read_load)
    monkeypatch.setattr(tuner.EngineProcesses, "started", made.processes)
    monkeypatch.setattr(preparation.rehearsal, "rehearse_variants", made.plan)
    return made
