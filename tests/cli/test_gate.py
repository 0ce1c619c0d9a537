"""What `slimqwen gate` says after its verdict, and how it ends when it is terminated."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from slimqwen.cli.gate import next_step
from tests.serving.real_server import ended

OWN = Path("eval/own/mine/questions.csv")


@pytest.mark.parametrize(
    ("undecided", "questions", "said"),
    [
        ("quality", OWN, "more questions in eval/own/mine/questions.csv would decide"),
        ("quality", None, "a larger suite than core would decide"),
        (
            "fidelity",
            OWN,
            "more texts (`texts` and `most_texts` of fidelity in the gate's settings) would decide",
        ),
    ],
)
def test_an_inconclusive_gate_says_what_the_undecided_check_lacks(undecided, questions, said) -> None:
    verdicts = dict.fromkeys(("fidelity", "acceptance", "quality", "engine"), "pass") | {
        undecided: "inconclusive"
    }
    record = SimpleNamespace(variant="mine", verdict="inconclusive", verdicts=verdicts)
    assert next_step(record, "core", questions).startswith(said)
    if undecided == "quality" and questions:
        planned = "more questions in eval/own/mine/questions.csv, 1,160 in all, would decide"
        assert next_step(record, "core", questions, 1160).startswith(planned)


@pytest.mark.engine
@pytest.mark.parametrize("activity", ["reading texts", "start tiny-mtp4"])
def test_a_measurement_that_is_terminated_leaves_nothing(activity: str) -> None:
    """With an engine in its own process, and while a server starts."""
    command = [sys.executable, "-u", "-m", "slimqwen.cli", "eval", "fidelity", "tiny-mtp4"]
    with (
        tempfile.TemporaryDirectory(prefix="t.", dir="/tmp") as folder,  # short enough for sockets
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "TMPDIR": folder},
        ) as process,
    ):
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if activity in line:
                break
        assert activity in said[-1], said
        time.sleep(2)
        family = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        assert process.wait(timeout=60) == 143  # in 2 s on a quiet host; a busy one takes longer
        assert process.stdout.read().endswith("terminated\n")
        assert ended(family, 30)
        assert not list(Path(folder).glob("slimqwen.*"))
