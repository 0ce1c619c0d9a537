"""Exit codes: a verdict where a verb gives one, and what an error or Ctrl-C ends with."""

import io
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from slimqwen.cli import console, gate, unexpected
from slimqwen.evals import gate as evaluation
from slimqwen.serving.errors import ServingError

GATE = ("gate", "--variant", "tiny-awq")


@pytest.mark.parametrize(("outcome", "code"), [("pass", 0), ("fail", 1), ("inconclusive", 2)])
def test_a_verdict_is_the_exit_code(monkeypatch, run_here, outcome, code):
    monkeypatch.setattr(evaluation, "measure_gate", lambda *_, **__: Path("record.json"))
    monkeypatch.setattr(gate, "show_record", lambda *_: SimpleNamespace(outcome=outcome))
    assert run_here(*GATE)[0] == code


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ServingError("no server; start one"), 3, "error: no server; start one"),
        (
            ZeroDivisionError("division by zero"),
            3,
            "error: unexpected ZeroDivisionError: division by zero; the",
        ),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_an_error_is_no_verdict(monkeypatch, run_here, tmp_path, error, code, message):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(unexpected, "_ROOT", tmp_path)
    monkeypatch.setattr(evaluation, "measure_gate", fail)
    found, _, said = run_here(*GATE)
    assert (found, message in said) == (code, True), said


def test_sigterm_ends_a_command_as_ctrl_c_does(monkeypatch, run_here):
    removed = []

    def measure(*_, **__):
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            removed.append("what it had made")

    monkeypatch.setattr(evaluation, "measure_gate", measure)
    code, _, said = run_here(*GATE)
    assert (code, "terminated" in said) == (143, True)
    assert removed
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_terminal_shows_one_bar_for_each_subject(monkeypatch):
    screen = Console(file=io.StringIO(), force_terminal=True, width=80, height=24)
    monkeypatch.setattr(console, "console", screen)
    with console._bars() as show:
        show("quality of tiny: generating answers", 3, 10)
        show("quality of tiny: ended", 1, 1)
        show("loading", 0, 0)
        show("layer 1", 2, 4)
    last = screen.file.getvalue().split("\r")[-1]
    assert "quality of tiny: ended" in last
    assert "layer 1" in last
    assert "generating" not in last
    assert "loading" not in last


def test_a_file_gets_a_line_for_what_begins_and_none_for_what_has_ended(capsys, monkeypatch):
    lines = []
    monkeypatch.setattr(console, "say", lines.append)
    with console._lines() as show:
        show("quality of tiny: generating answers", 0, 0)
        show("quality of tiny: generating answers", 5, 10)
        show("quality of tiny: ended", 1, 1)
    assert lines == ["quality of tiny: generating answers …"]


@pytest.mark.parametrize(("unit", "share"), [(1, "60/100"), (100, "6000/10000"), (2**20, "60%")])
def test_a_file_gets_a_line_a_minute_with_the_time_left(monkeypatch, unit, share):
    lines, clock = [], iter([0.0, 30.0, 90.0, 100.0, 160.0])
    monkeypatch.setattr(console, "say", lines.append)
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    with console._lines() as show:
        for done in (0, 20, 60, 65, 100):
            show("calibrate (1 of 4): layers", done * unit, 100 * unit)
    assert lines == [
        "calibrate (1 of 4): layers …",
        f"calibrate (1 of 4): layers {share}, about 1 min left",
    ]


def test_an_activity_that_begins_anew_has_the_time_left_of_its_present_run(monkeypatch):
    lines, clock = [], iter([0.0, 50.0, 500.0, 560.0])
    monkeypatch.setattr(console, "say", lines.append)
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    with console._lines() as show:
        for done in (0, 100, 0, 50):
            show("reading texts", done, 100)
    assert lines == ["reading texts …", "reading texts 50/100, about 1 min left"]
