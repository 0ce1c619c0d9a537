"""The local executor with real processes."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from slimqwen.processes import ExecutorError, Failure, LocalExecutor, Resources, Result, Task, local
from tests.processes import tasks


@pytest.fixture
def all_cpus() -> Iterator[None]:
    """Every CPU of the machine: a worker of the test run keeps to its share."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    yield
    os.sched_setaffinity(0, before)


def test_a_task_gives_its_value_and_reports_its_progress(tmp_path: Path) -> None:
    heard = []
    with LocalExecutor(tmp_path, lambda *report: heard.append(report)) as executor:
        executor.submit(Task("key", "double 4", tasks.double, 4))
        outcome = executor.wait()
    assert isinstance(outcome, Result)
    assert (outcome.key, outcome.value) == ("key", 8)
    assert heard == [("double 4: doubling", 1, 1), ("double 4: ended", 1, 1)]


@pytest.mark.parametrize(
    ("function", "argument", "reason"),
    [
        (tasks.refuse, "no such variant; name another", "no such variant; name another"),
        (tasks.raise_defect, None, "ValueError: a defect"),
        (tasks.crash, None, "its process died (SIGSEGV); read why in its log: logs/tasks.log"),
    ],
)
def test_what_raises_or_crashes_is_a_failure_with_its_reason(
    tmp_path: Path, function: object, argument: object, reason: str
) -> None:
    with LocalExecutor(tmp_path) as executor:
        executor.submit(Task("key", "title", function, argument))
        executor.submit(Task("next", "title", tasks.double, 1))
        outcome = executor.wait()
        assert isinstance(outcome, Failure)
        assert outcome.reason == reason
        assert executor.wait().key == "next"


def test_one_key_is_run_once(tmp_path: Path) -> None:
    with LocalExecutor(tmp_path) as executor:
        executor.submit(Task("key", "first", tasks.double, 1))
        executor.submit(Task("key", "second", tasks.double, 2))
        outcome = executor.wait()
        assert isinstance(outcome, Result)
        assert outcome.value == 2
        with pytest.raises(ExecutorError, match="no task is pending; submit one"):
            executor.wait()


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two tasks on CPUs of their own need two CPUs")
@pytest.mark.usefixtures("all_cpus")
@pytest.mark.parametrize("warm", [False, True])
def test_two_tasks_run_beside_each_other_on_cpus_of_their_own(tmp_path: Path, warm: bool) -> None:
    with LocalExecutor(tmp_path, warm=warm, width=2) as executor:
        for name in ("a", "b"):
            executor.submit(Task(name, name, tasks.meet, name))
        outcomes = sorted((executor.wait(), executor.wait()), key=lambda outcome: outcome.key)
    met = [outcome.value for outcome in outcomes if isinstance(outcome, Result)]
    assert [other for other, _ in met] == ["b", "a"]
    assert all(cpus for _, cpus in met)
    assert met[0][1].isdisjoint(met[1][1])


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two tasks on CPUs of their own need two CPUs")
@pytest.mark.usefixtures("all_cpus")
def test_the_last_task_gets_the_cpus_that_no_other_uses(tmp_path: Path) -> None:
    every = len(os.sched_getaffinity(0))
    with LocalExecutor(tmp_path, width=2) as executor:
        executor.submit(Task("key", "title", tasks.await_cpus, every))
        outcome = executor.wait()
    assert isinstance(outcome, Result)
    assert outcome.value == every


def test_an_urgent_task_begins_before_those_that_wait(tmp_path: Path) -> None:
    with LocalExecutor(tmp_path) as executor:
        for name, urgent in (("a", False), ("b", False), ("c", True)):
            executor.submit(Task(name, name, tasks.double, 1, urgent=urgent))
        assert [executor.wait().key for _ in range(3)] == ["c", "a", "b"]


def test_a_task_that_needs_the_whole_node_or_too_much_memory_runs_alone(tmp_path: Path) -> None:
    needs = [
        Resources(),
        Resources(whole_node=True),
        Resources(),
        Resources(memory_bytes=1 << 60),
        Resources(gpus=1),
    ]
    with LocalExecutor(tmp_path, width=3) as executor:
        for number, resources in enumerate(needs):
            executor.submit(Task(f"{number}", "title", tasks.look_beside, f"{number}", resources))
        outcomes = [executor.wait() for _ in needs]
    ended = {outcome.key: outcome.value for outcome in outcomes if isinstance(outcome, Result)}
    assert {key: beside for key, (beside, _) in ended.items()} == {
        f"{number}": [] for number in range(len(needs))
    }
    assert ended["1"][1] == ended["4"][1] == os.sched_getaffinity(0)  # a timing, an engine on a GPU


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two tasks on CPUs of their own need two CPUs")
@pytest.mark.usefixtures("all_cpus")
@pytest.mark.parametrize(("needed", "left"), [(1 << 20, 2), (2 << 30, 1), (5 << 30, 1)])
def test_processes_without_a_task_end_if_their_memory_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needed: int, left: int
) -> None:
    monkeypatch.setattr(local.host, "available_memory", lambda: 4 << 30)
    before = set(psutil.Process().children())
    with LocalExecutor(tmp_path, width=2) as executor:
        for name in ("a", "b"):
            executor.submit(Task(name, name, tasks.meet, name))
        executor.wait(), executor.wait()
        executor.submit(Task("c", "c", tasks.double, 1, Resources(memory_bytes=needed)))
        executor.wait()
        assert len(set(psutil.Process().children()) - before) == left


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two lanes have CPUs of their own on two CPUs")
@pytest.mark.usefixtures("all_cpus")
def test_a_task_has_every_cpu_while_the_next_one_waits_for_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local.host, "total_memory", lambda: 5 << 30)
    every = len(os.sched_getaffinity(0))
    with LocalExecutor(tmp_path, width=2) as executor:
        for name in ("a", "b"):
            executor.submit(Task(name, name, tasks.await_cpus, every, Resources(memory_bytes=3 << 30)))
        outcomes = [executor.wait() for _ in range(2)]
    assert [outcome.value for outcome in outcomes if isinstance(outcome, Result)] == [every, every]


@pytest.mark.parametrize("others", [0, 1])
def test_an_interrupt_stops_every_running_task(tmp_path: Path, others: int) -> None:
    with LocalExecutor(tmp_path, width=2) as executor:
        for number in range(others):
            executor.submit(Task(f"{number}", "title", tasks.hold, "x"))
        executor.submit(Task("key", "title", tasks.interrupt, (os.getpid(), others)))
        with pytest.raises(KeyboardInterrupt):
            executor.wait()
    pids = [int((tmp_path / "pid.txt").read_text())]
    if others:
        pids += map(int, (tmp_path / "pids.txt").read_text().split())
    assert len(pids) == 1 + others
    until = time.monotonic() + 30
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(map(psutil.pid_exists, pids))


@pytest.mark.parametrize(("cuda", "cores", "width"), [(True, 8, 1), (False, 2, 2), (False, 16, 4)])
def test_by_default_a_task_runs_on_each_core_or_one_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, cuda: bool, cores: int, width: int
) -> None:
    monkeypatch.setattr(local.host, "detect", lambda: "cuda" if cuda else "cpu")
    monkeypatch.setattr(local.host, "physical_cores", lambda: cores)
    assert local.default_width() == width
