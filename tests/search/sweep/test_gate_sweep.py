"""A sweep of gates: its checks are tasks, its verdict is the driver's, and what holds is not measured again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slimqwen import variant
from slimqwen.checkpoint.files import carry_all
from slimqwen.evals import acceptance, fidelity, quality_parts
from slimqwen.evals.engine import modes
from slimqwen.evals.gate import Gate
from slimqwen.evals.quality_parts import PartAnswers
from slimqwen.evals.suites.lm_eval_run import Item, Part, TaskRun
from slimqwen.evals.suites.suite import Suite
from slimqwen.progress import silent
from slimqwen.records import provenance, store
from slimqwen.search.executors import Outcome, Result, Task
from slimqwen.search.sweep.driver import sweep
from slimqwen.search.sweep.plan import Options
from slimqwen.serving import unsafe_engines
from slimqwen.variant import Variant
from tests.evals.gate_checks import Checks
from tests.search.sweep.test_driver import Nodes

ROOT = Path(__file__).parents[3]
OPTIONS = Options(measures=("gate",), command=("slimqwen", "sweep"), parts=2)


class InProcess(Nodes):
    """An executor that calls each function in this process, where the measurements are stand-ins."""

    def wait(self) -> Outcome:
        task: Task = self.waiting.popleft()
        self.ran.append(task)
        value = task.function(self.root, task.argument, silent)
        return Result(task.key, value, "node", provenance.hardware(), 1.0, 1)


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch, stamps: None) -> Checks:
    made = Checks()
    for module in (fidelity, acceptance):
        monkeypatch.setattr(module, "measure", getattr(made, module.__name__.rpartition(".")[2]))
    monkeypatch.setattr(modes, "measure", made.engine)

    def ask(one: Variant, suite: Suite, part: Part, **_: Any) -> PartAnswers:
        made.asked.append(("quality", one.name))
        right = made.right if one.name != "tiny" else 200
        runs = [
            TaskRun(
                task,
                [Item(task.name, n, f"{n:016x}", float(n < right), 1.0, None, None) for n in part.of(400)],
                400,
                False,
            )
            for task in suite.tasks[:1]
        ]
        return PartAnswers(runs, made.described(one))

    monkeypatch.setattr(quality_parts, "ask", ask)
    return made


@pytest.fixture
def root(tmp_path: Path, add_variant: Callable[..., Path]) -> Path:
    add_variant("tiny", "VLLM_MODEL=weights/tiny\nVLLM_MAX_MODEL_LEN=256\nEVALUATION=tinyworld\n")
    add_variant("small", "BASE=tiny\nVLLM_MODEL=weights/small\n", baseline="tiny")
    (tmp_path / "weights" / "small").mkdir(parents=True)
    (tmp_path / "weights" / "tiny").symlink_to(ROOT / "weights" / "tiny")
    carry_all(ROOT / "weights" / "tiny", tmp_path / "weights" / "small")
    (tmp_path / "eval").mkdir()
    for entry in (ROOT / "eval").iterdir():
        if entry.name != unsafe_engines.FILE.name:
            (tmp_path / "eval" / entry.name).symlink_to(entry)
    InProcess.root = tmp_path
    return tmp_path


def test_the_gate_of_a_sweep_is_that_of_its_checks(root: Path, checks: Checks) -> None:
    checks.unsafe_elsewhere = 1
    executor = InProcess()
    (result,) = sweep(["small"], OPTIONS, executor, root)
    assert (result.failure, result.outcome) == (None, "pass")
    assert [task.title for task in executor.ran] == [
        "fidelity of small", "acceptance of small", "engine of small", "quality 1/2 of small", "quality 2/2 of small",
    ]  # fmt: skip
    record = store.read(result.records[-1], Gate)
    assert record.verdicts == dict.fromkeys(("fidelity", "acceptance", "quality", "engine"), "pass")
    assert len(record.records) == 6
    assert all((root / "experiments" / name).is_file() for name in record.records)
    assert record.provenance.command == "slimqwen sweep"
    assert len(unsafe_engines.read(root)) == 1


def test_what_holds_is_not_measured_again(root: Path, checks: Checks) -> None:
    sweep(["small"], OPTIONS, InProcess(), root)
    executor = InProcess()
    (result,) = sweep(["small"], OPTIONS, executor, root)
    assert executor.ran == []
    assert result.outcome == "pass"


def test_one_check_decides(root: Path, checks: Checks) -> None:
    checks.right = 100
    (result,) = sweep(["small"], OPTIONS, InProcess(), root)
    assert result.outcome == "fail"
    assert variant.load("small", root).folder / result.records[-1].name == result.records[-1]
