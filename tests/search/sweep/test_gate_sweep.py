"""A sweep of gates: its checks are tasks, its verdict is the driver's, and what holds is not measured again."""

from pathlib import Path

from slimqwen import variant
from slimqwen.evals.gate import Gate
from slimqwen.records import store
from slimqwen.search.sweep.driver import sweep
from slimqwen.search.sweep.plan import Options
from slimqwen.serving import unsafe_engines
from tests.evals.gate_checks import Checks
from tests.search.gates import InProcess

OPTIONS = Options(measures=("gate",), command=("slimqwen", "sweep"), parts=2)


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
    checks.wrong = {("small", None): 100}
    (result,) = sweep(["small"], OPTIONS, InProcess(), root)
    assert result.outcome == "fail"
    assert variant.load("small", root).folder / result.records[-1].name == result.records[-1]
