from pathlib import Path

import psutil
import pytest

from slimqwen.search import SearchError
from slimqwen.search.executors import Failure, LocalExecutor, Result, Task
from tests.search.executors import tasks


def test_a_task_gives_its_value_and_reports_its_progress(tmp_path: Path) -> None:
    heard = []
    with LocalExecutor(tmp_path, lambda *report: heard.append(report)) as executor:
        executor.submit(Task("key", "double 4", tasks.double, 4))
        assert executor.pending == 1
        outcome = executor.wait()
    assert isinstance(outcome, Result)
    assert (outcome.key, outcome.value) == ("key", 8)
    assert heard == [("double 4: doubling", 1, 1)]
    assert executor.pending == 0


@pytest.mark.parametrize(
    ("function", "argument", "reason"),
    [
        (tasks.refuse, "no such variant; name another", "no such variant; name another"),
        (tasks.raise_defect, None, "ValueError: a defect"),
        (tasks.crash, None, "its process died (SIGSEGV); its log is logs/task-key.log"),
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
        executor.submit(Task("key", "second", tasks.double, 1))
        assert executor.pending == 1


def test_an_interrupt_stops_the_running_task(tmp_path: Path) -> None:
    with LocalExecutor(tmp_path) as executor:
        executor.submit(Task("key", "title", tasks.interrupt_parent, None))
        with pytest.raises(KeyboardInterrupt):
            executor.wait()
    assert not psutil.pid_exists(int((tmp_path / "pid.txt").read_text()))


def test_nothing_to_wait_for_is_an_error(tmp_path: Path) -> None:
    with LocalExecutor(tmp_path) as executor, pytest.raises(SearchError, match="no task is pending"):
        executor.wait()
