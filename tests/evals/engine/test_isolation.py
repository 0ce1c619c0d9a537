"""What a function in a process of its own returns, and what a crash, a hang or a refusal becomes."""

import dataclasses
import os

import psutil
import pytest

from slimqwen import variant
from slimqwen.evals import EvalError
from slimqwen.evals.engine.isolation import Engines
from slimqwen.progress import silent
from slimqwen.serving.command import ServerCommand
from tests.evals.engine import isolated_functions

TINY = variant.repository_root() / "weights" / "tiny"


def started(log):
    return Engines.started(ServerCommand.resolve(variant.load("tiny")), 600, log)


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    with started(tmp_path_factory.mktemp("logs") / "log") as engines:
        yield engines


@pytest.fixture
def run(engines):
    def run(function, task, timeout_s=600, progress=silent):
        return dataclasses.replace(engines, timeout_s=timeout_s).run(function, task, progress)

    return run


def test_the_result_and_the_progress_come_back(run):
    reports = []
    assert run(isolated_functions.double, 21, progress=lambda *report: reports.append(report)) == 42
    assert reports == [("doubling", 1, 2)]


@pytest.mark.parametrize(
    ("function", "task", "timeout_s", "line"),
    [
        (isolated_functions.raise_error, None, 600, "greedy: RuntimeError: sizes do not match"),
        (isolated_functions.end_by_signal, "SIGSEGV", 600, "aborts: the process died (SIGSEGV)"),
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
        (isolated_functions.end_before_it_begins, None, r"ended before its first report \(exit code 3\)"),
    ],
)
def test_what_is_no_fault_of_the_function_is_an_error(run, function, task, message):
    with pytest.raises(EvalError, match=message):
        run(function, task)


def test_each_process_has_its_own_variables_and_threads(engines):
    def variables(**environment):
        server = dataclasses.replace(engines.server, environment=environment)
        own = dataclasses.replace(engines, server=server)
        return own.run(isolated_functions.variables, ("OF_THE_CELL",), silent)

    assert variables(OMP_NUM_THREADS="3", OF_THE_CELL="4") == (3, "4")
    assert variables(OMP_NUM_THREADS="3") == (3, None)


def test_the_end_of_the_starting_process_is_an_error(tmp_path):
    with started(tmp_path / "log") as engines:
        engines.worker._process.kill()
        engines.worker._process.wait()
        with pytest.raises(EvalError, match="the process that starts engines died"):
            engines.run(isolated_functions.double, 21, silent)


def test_a_process_ends_with_its_starter(tmp_path):
    with started(tmp_path / "log") as engines:
        process = psutil.Process(
            engines.worker.give(dict(os.environ), isolated_functions.hang, TINY, tmp_path, None)
        )
    assert psutil.wait_procs([process], timeout=30)[1] == []
