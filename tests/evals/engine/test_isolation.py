"""What a function in a process of its own returns, and what a crash, a hang or a refusal becomes."""

import functools
import os

import psutil
import pytest

from slimqwen import variant
from slimqwen.evals import EvalError
from slimqwen.evals.engine.isolation import engine_processes, run_isolated
from slimqwen.progress import silent
from tests.evals.engine import isolated_functions

TINY = variant.repository_root() / "weights" / "tiny"


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    with engine_processes(dict(os.environ), tmp_path_factory.mktemp("logs") / "log") as worker:
        yield worker


@pytest.fixture
def run(worker, tmp_path):
    return functools.partial(_run, worker, tmp_path)


def _run(worker, tmp_path, function, task, timeout_s=600, progress=silent):
    return run_isolated(
        function,
        TINY,
        task,
        worker=worker,
        environment=dict(os.environ),
        timeout_s=timeout_s,
        log=tmp_path / "log",
        progress=progress,
    )


def test_the_result_and_the_progress_come_back(run):
    reports = []
    assert run(isolated_functions.double, 21, progress=lambda *report: reports.append(report)) == 42
    assert reports == [("doubling", 1, 2)]


@pytest.mark.parametrize(
    ("function", "task", "timeout_s", "line"),
    [
        (isolated_functions.raise_error, None, 600, "greedy: RuntimeError: sizes do not match"),
        (isolated_functions.end_by_signal, "SIGSEGV", 600, "aborts: the process died (signal SIGSEGV)"),
        (isolated_functions.hang, None, 8, "mixed: no end within 8 s"),
    ],
)
def test_a_breakdown_is_one_line_that_names_the_activity(run, function, task, timeout_s, line):
    assert run(function, task, timeout_s) == line


@pytest.mark.parametrize(
    ("function", "task", "message"),
    [
        (isolated_functions.refuse, None, "prompts do not fit"),
        (isolated_functions.end_by_signal, "SIGKILL", "as when memory runs out"),
        (isolated_functions.end_before_it_begins, None, r"did not begin \(exit code 3\)"),
    ],
)
def test_what_is_no_fault_of_the_function_is_an_error(run, function, task, message):
    with pytest.raises(EvalError, match=message):
        run(function, task)


def test_each_process_has_its_own_variables_and_threads(run, worker, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("OF_THE_CELL", "4")
    assert run(isolated_functions.variables, ("OF_THE_CELL",)) == (3, "4")
    monkeypatch.delenv("OF_THE_CELL")
    assert run(isolated_functions.variables, ("OF_THE_CELL",)) == (3, None)


def test_the_end_of_the_starting_process_is_an_error(tmp_path):
    with engine_processes(dict(os.environ), tmp_path / "log") as worker:
        worker._process.kill()
        worker._process.wait()
        with pytest.raises(EvalError, match="the process that starts engines died"):
            _run(worker, tmp_path, isolated_functions.double, 21)


def test_a_process_ends_with_its_starter(tmp_path):
    with engine_processes(dict(os.environ), tmp_path / "log") as worker:
        process = psutil.Process(worker.give(dict(os.environ), isolated_functions.hang, TINY, tmp_path, None))
    assert psutil.wait_procs([process], timeout=30)[1] == []
