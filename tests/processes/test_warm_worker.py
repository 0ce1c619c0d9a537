"""The warm worker: what its messages say, and in which order they come."""

import os
from pathlib import Path
from typing import Any

from slimqwen.processes import worker
from slimqwen.processes.warm_worker import WarmWorker
from slimqwen.progress import Progress


def job(number: int, progress: Progress) -> Any:
    progress("working", 1, 1)
    return {"number": number, "process": os.getpid()}


def test_a_job_that_reports_at_once_comes_after_its_process_id(tmp_path: Path) -> None:
    module = "tests.processes.slow_warm_worker"
    with (
        (tmp_path / "log").open("wb") as output,
        worker.started(os.environ, output, module) as (process, messages),
    ):
        warm = WarmWorker(messages, process)
        for number in (1, 2):
            job_process = warm.give(os.environ, tmp_path, job, number)
            assert messages.recv() == ("progress", "working", 1, 1)
            kind, facts, *_ = messages.recv()
            assert (kind, facts) == ("done", {"number": number, "process": job_process})
            assert messages.recv() == ("ended", 0)
