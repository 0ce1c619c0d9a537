"""A worker's figures come back; one that fails, dies or hangs ends in one line; an engine's steps are counted."""

import os
from pathlib import Path
from typing import Any

import pytest

from slimqwen import variant
from slimqwen.analysis.levers import turns
from slimqwen.analysis.levers.turns import Task, TurnError
from slimqwen.serving.command import ServerCommand
from tests.analysis.levers import jobs


def in_worker(job: Any, tmp_path: Path, timeout_s: float = 30.0, progress: Any = print) -> Any:
    return turns.in_worker(
        job,
        Path("weights/none"),
        5,
        environment={**os.environ, "OMP_NUM_THREADS": "2"},
        log=tmp_path / "logs" / "worker.log",
        timeout_s=timeout_s,
        progress=progress,
    )


def test_figures_and_progress_come_back_from_a_process_with_its_own_environment(tmp_path: Path) -> None:
    heard: list[Any] = []
    figures = in_worker(jobs.answer, tmp_path, progress=lambda *message: heard.append(message))
    assert figures == {"threads": 2.0, "task": 5.0}
    assert heard == [("working", 1, 2)]


def test_a_failure_is_one_line_that_names_the_log(tmp_path: Path) -> None:
    with pytest.raises(TurnError, match=r"none failed: ValueError: no such kernel; its log is .*worker\.log"):
        in_worker(jobs.fail, tmp_path)
    assert "Traceback" in (tmp_path / "logs" / "worker.log").read_text()


def test_a_process_that_dies_is_named(tmp_path: Path) -> None:
    with pytest.raises(TurnError, match="died"):
        in_worker(jobs.die, tmp_path)


def test_a_process_that_hangs_is_ended(tmp_path: Path) -> None:
    with pytest.raises(TurnError, match="did not end in time"):
        in_worker(jobs.hang, tmp_path, timeout_s=1.0)


@pytest.mark.engine
def test_an_engine_gives_steps_and_tokens_after_the_first(tmp_path: Path) -> None:
    subject = variant.load("tiny")
    command = ServerCommand.resolve(subject)
    figures, load = turns.in_worker(
        turns.decode,
        subject.weights,
        Task(dict(command.flags), prompt_tokens=16, output_tokens=24),
        environment=command.process_environment(),
        log=tmp_path / "worker.log",
        timeout_s=600.0,
    )
    assert figures["steps"] == figures["tokens"] == 23
    assert 0 < figures["seconds"] < 60
    assert figures["memory"] > 100e6
    assert load.seconds >= figures["seconds"]
    assert 0.0 <= load.other_share <= 1.5
