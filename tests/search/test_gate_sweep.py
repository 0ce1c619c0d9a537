"""A sweep of gates: its checks are tasks, its verdict is the driver's, and what holds is not measured again."""

from pathlib import Path

from slimqwen import variant
from slimqwen.evals.gate import Gate
from slimqwen.records import store
from slimqwen.search.measurements import Options
from slimqwen.search.sweep import sweep
from tests.evals.gate_checks import Checks
from tests.search.in_process import InProcess

OPTIONS = Options(measures=("gate",), command=("slimqwen", "demo"), parts=2)


def test_the_gate_of_a_sweep_is_that_of_its_checks(root: Path, checks: Checks) -> None:
    executor = InProcess(root)
    (result,) = sweep(["small"], OPTIONS, executor, root)
    assert result.failure is None
    assert [task.title for task in executor.ran] == [
        "quality 1/2 of tiny", "quality 2/2 of tiny", "acceptance of tiny",
        "engine of small", "quality 1/2 of small", "quality 2/2 of small", "fidelity of small", "acceptance of small",
    ]  # fmt: skip
    record = store.read_record(result.records["gate"][0], Gate)
    assert record.outcome == "pass"
    assert record.verdicts == dict.fromkeys(("fidelity", "acceptance", "quality", "engine"), "pass")
    assert len(record.records) == 6
    assert all((root / "experiments" / name).is_file() for name in record.records)
    assert record.provenance.command == "slimqwen demo"


def test_checks_alone_leave_their_records_in_the_folder_that_is_named(root: Path, checks: Checks) -> None:
    options = Options(measures=("acceptance", "fidelity"), command=("slimqwen", "demo"), records="demo")
    executor = InProcess(root)
    (result,) = sweep(["small"], options, executor, root)
    titles = [task.title for task in executor.ran]
    assert titles == ["acceptance of tiny", "fidelity of small", "acceptance of small"]
    assert result.failure is None
    folders = {
        name: [path.parent.relative_to(root) for path in paths] for name, paths in result.records.items()
    }
    tiny, small = Path("demo/tiny"), Path("demo/small")
    assert folders == {"acceptance": [tiny, small], "fidelity": [small]}


def test_what_holds_is_not_measured_again(root: Path, checks: Checks) -> None:
    (first,) = sweep(["small"], OPTIONS, InProcess(root), root)
    executor = InProcess(root)
    (result,) = sweep(["small"], OPTIONS, executor, root)
    assert executor.ran == []
    assert result.records == first.records


def test_one_check_decides(root: Path, checks: Checks) -> None:
    checks.wrong = {("small", None): 100}
    (result,) = sweep(["small"], OPTIONS, InProcess(root), root)
    (path,) = result.records["gate"]
    assert store.read_record(path, Gate).outcome == "fail"
    assert path.parent == variant.load("small", root).folder


def test_nothing_follows_from_some_checks_of_a_gate(root: Path, checks: Checks) -> None:
    executor = InProcess(root)
    executor.broken = "fidelity of small"
    options = Options(measures=("gate", "latency"), command=("slimqwen", "demo"))
    (result,) = sweep(["small"], options, executor, root)
    assert result.failures.keys() == {"fidelity"}
    assert result.records.keys() == {"acceptance", "quality", "engine"}
    assert not any(task.title.startswith("latency") for task in executor.ran)
