"""Engines in processes of their own: what comes back, and what a breakdown becomes."""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from slimqwen import variant
from slimqwen.evals import EvalError
from slimqwen.evals.engine_runs import EngineProcesses
from slimqwen.progress import silent
from slimqwen.serving.command import ServerCommand
from tests.evals import engine_jobs
from tests.evals.test_engine_process import TINY


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcesses]:
    server, log = ServerCommand.resolve(variant.load("tiny")), tmp_path_factory.mktemp("logs") / "log"
    with EngineProcesses.started(server, 600, log) as processes:
        yield processes


def test_the_result_and_the_titled_progress_come_back(processes: EngineProcesses) -> None:
    reports: list[tuple[str, float, float]] = []
    assert processes.run(engine_jobs.double, 21, "title", lambda *report: reports.append(report)) == 42
    assert reports == [("title: doubling", 1, 2)]


@pytest.mark.parametrize(
    ("function", "task", "timeout_s", "line"),
    [
        (engine_jobs.raise_error, None, 600, "alone: RuntimeError: sizes do not match"),
        (engine_jobs.end_by_signal, "SIGSEGV", 600, "cached: the process died (SIGSEGV)"),
        (engine_jobs.hang, None, 8, "together: not finished within 8 s"),
    ],
)
def test_a_breakdown_is_one_line_that_names_the_activity(
    processes: EngineProcesses, function: Any, task: Any, timeout_s: float, line: str
) -> None:
    assert dataclasses.replace(processes, timeout_s=timeout_s).run(function, task, "x", silent) == line


@pytest.mark.parametrize(
    ("function", "task", "message"),
    [
        (engine_jobs.refuse, None, "prompts do not fit"),
        (
            engine_jobs.end_by_signal,
            "SIGKILL",
            r"served: the process ended cached \(SIGKILL, as when memory runs out\); free memory and run .*; its log: ",
        ),
        (engine_jobs.end_before_it_begins, None, r"ended before its first report \(exit code 3\)"),
    ],
)
def test_what_is_no_fault_of_the_engine_is_an_error(
    processes: EngineProcesses, function: Any, task: Any, message: str
) -> None:
    with pytest.raises(EvalError, match=message):
        processes.run(function, task, "served", silent)


def test_each_process_has_its_own_variables_and_threads(processes: EngineProcesses) -> None:
    def variables(*names: str, is_served: bool = True, **environment: str) -> Any:
        server = dataclasses.replace(processes.server, environment=environment)
        own = dataclasses.replace(processes, server=server)
        return own.run(engine_jobs.variables, names, "x", silent, is_served=is_served)

    assert variables("OF_THE_ENGINE", OMP_NUM_THREADS="3", OF_THE_ENGINE="4") == (3, "4")
    assert variables("OF_THE_ENGINE", OMP_NUM_THREADS="3") == (3, None)
    compiled = ("VLLM_DISABLE_COMPILE_CACHE", "TORCHINDUCTOR_CACHE_DIR", "SLIMQWEN_COMPILE_CACHE")
    watched = {"OMP_NUM_THREADS": "1", "SLIMQWEN_COMPILE_CACHE": "{}"}
    assert variables(*compiled, **watched) == (1, None, None, None)
    shared = str(variant.repository_root() / ".cache" / "engines")
    assert variables(*compiled, is_served=False, **watched) == (1, "1", shared, None)


def test_the_end_of_the_starting_process_ends_its_engine_and_is_an_error(
    processes: EngineProcesses, tmp_path: Path
) -> None:
    """The last test: it ends what the others use."""
    starter = processes.worker._process
    process = psutil.Process(
        processes.worker.give(dict(os.environ), tmp_path, engine_jobs.hang, TINY, tmp_path, None)
    )
    starter.kill()
    starter.wait()
    assert psutil.wait_procs([process], timeout=30)[1] == []
    with pytest.raises(EvalError, match="the helper process that starts vLLM's engines died"):
        processes.run(engine_jobs.double, 21, "x", silent)
