"""Exit codes: a verdict where a verb gives one, and what an error or Ctrl-C ends with."""

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from rich.console import Console

from slimqwen import api, variant
from slimqwen.cli import console, gate, unexpected
from slimqwen.evals import gate as evaluation
from slimqwen.evals.suites.suite import Suite
from slimqwen.records import provenance
from slimqwen.serving.errors import ServingError

GATE = ("gate", "--variant", "tiny-mtp4")  # it serves weights/tiny, so its weights are here


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(("outcome", "code"), [("pass", 0), ("fail", 1), ("inconclusive", 2)])
def test_a_verdict_is_the_exit_code_and_is_written_into_the_page_of_an_own_variant(
    monkeypatch, run_here, outcome, code, own
):
    updated = []
    monkeypatch.setattr(provenance, "own_variants", lambda root: {"tiny-mtp4"} if own else set())
    monkeypatch.setattr(gate, "update_page", lambda folder, *, newest: updated.append((folder.name, newest)))
    verdicts = {"outcome": outcome, "verdict": outcome, "verdicts": {"quality": outcome}}
    record = SimpleNamespace(variant="tiny-mtp4", **verdicts)
    suite = Suite.load("tinyworld", variant.repository_root())
    judgement = api.Judged(Path("record.json"), None, (), suite, Path("log"))
    monkeypatch.setattr(api, "judge", lambda *_, **__: judgement)
    monkeypatch.setattr(gate, "show_record", lambda *_: record)
    assert run_here(*GATE)[0] == code
    assert updated == ([("tiny-mtp4", True)] if own else [])


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

    monkeypatch.setattr(unexpected, "repository_root", lambda: tmp_path)
    monkeypatch.setattr(evaluation, "measure_gate", fail)
    found, _, said = run_here(*GATE)
    assert (found, message in said) == (code, True), said


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_a_command_as_ctrl_c_does(monkeypatch, run_here, number, exit_code):
    removed = []

    def measure(*_, **__):
        try:
            signal.raise_signal(number)
        finally:
            removed.append("what it had made")

    monkeypatch.setattr(evaluation, "measure_gate", measure)
    before = signal.signal(number, signal.SIG_DFL)  # a test run under nohup ignores SIGHUP
    code, _, said = run_here(*GATE)
    assert signal.signal(number, before) == signal.SIG_DFL
    assert (code, "terminated" in said) == (exit_code, True)
    assert removed


@pytest.mark.parametrize(
    ("interactive", "says_first", "told"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_a_command_that_prints_nothing_tells_a_terminal_that_it_loads_libraries(
    monkeypatch, capfd, interactive, says_first, told
):
    monkeypatch.setattr(console, "_SILENT_S", 0.1)
    for name in ("errors", "console"):
        shown = console._Terminal(stderr=name == "errors", force_interactive=interactive)
        monkeypatch.setattr(console, name, shown)
    app = typer.Typer()

    @app.command()
    def verb() -> None:
        if says_first:
            console.say("it begins")
        time.sleep(0.4)
        console.say("done")

    monkeypatch.setattr(sys, "argv", ["x"])
    with pytest.raises(SystemExit):
        console.run_command_line(app, "x")
    assert ("loading libraries …" in capfd.readouterr().err) == told


def test_nohup_keeps_a_command_alive(monkeypatch, run_here):
    monkeypatch.setattr(evaluation, "measure_gate", lambda *_, **__: signal.raise_signal(signal.SIGHUP))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        code, *_ = run_here(*GATE)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert code != 129


SHOW = """
from slimqwen.cli import console
with console.waiting("reading"), console.progress_bar() as show:
    show("work", 0, 2), show("work", 2, 2)
console.say("done")
"""


@pytest.mark.parametrize("setting", [{"FORCE_COLOR": "1"}, {"TTY_COMPATIBLE": "1"}, {"TERM": "dumb"}])
def test_a_file_gets_lines_whatever_the_shell_says_of_its_terminal(setting):
    done = subprocess.run(
        [sys.executable, "-c", SHOW],
        env={**os.environ, **setting},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("work …\ndone\n", "")


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
    lines, clock = [], iter([0.0, 50.0, 500.0, 560.0, 620.0])
    monkeypatch.setattr(console, "say", lines.append)
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    with console._lines() as show:
        for done in (0, 100, 0, 25, 62.5):
            show("reading texts", done, 100)
    assert lines == ["reading texts …", "reading texts 25/100", "reading texts 62.5/100, about 1 min left"]


def test_an_activity_that_returns_after_others_of_its_subject_begins_anew(monkeypatch):
    lines, clock = [], iter([0.0, 10.0, 20.0, 5000.0, 5060.0, 5120.0])
    monkeypatch.setattr(console, "say", lines.append)
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    with console._lines() as show:
        for activity, done in (
            ("medium", 2),
            ("medium", 6),
            ("long", 0),
            ("medium", 7),
            ("medium", 9),
            ("medium", 12),
        ):
            show(f"acceptance of tiny: {activity}", done, 18)
    assert lines == [
        "acceptance of tiny: medium …",
        "acceptance of tiny: long …",
        "acceptance of tiny: medium 9/18, about 4 min left",
        "acceptance of tiny: medium 12/18, about 2 min left",
    ]


def test_the_time_of_the_start_foretells_nothing(monkeypatch):
    lines, clock = [], iter([0.0, 200.0, 210.0, 265.0])
    monkeypatch.setattr(console, "say", lines.append)
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    with console._lines() as show:
        for done in (0, 1, 2, 7):
            show("texts", done, 18)
    assert lines == ["texts …", "texts 1/18", "texts 7/18, about 2 min left"]


def test_a_message_names_files_of_the_repository_from_the_working_folder(monkeypatch, tmp_path):
    root = variant.repository_root()
    message = (
        "eval/own.yaml:3: no 'weights/tiny', a/own.yaml, VLLM_MODEL=weights/tiny; see /eval. In weights/tiny."
    )
    shown = {
        root: message,
        root / "eval": message.replace("eval/own", "own", 1)
        .replace("'weights", "'../weights")
        .replace("In ", "In ../"),
        tmp_path: message.replace("eval/own", f"{root}/eval/own", 1)
        .replace("'weights", f"'{root}/weights")
        .replace("In ", f"In {root}/"),
    }
    for folder, expected in shown.items():
        monkeypatch.chdir(folder)
        assert console.from_here(message) == expected
    monkeypatch.chdir(root / "eval")
    absolute = f"{root}/eval/own.yaml:3: in {root}/README.md, VLLM_MODEL={root}/eval/x"
    assert console.from_here(absolute) == absolute.replace(f"{root}/eval/", "", 1)


def test_files_are_named_from_the_working_folder(monkeypatch):
    root = variant.repository_root()
    file = root / "experiments" / "tiny" / "config.env"
    for folder, shown in (
        (root, "experiments/tiny/config.env"),
        (root / "experiments" / "tiny", "config.env"),
    ):
        monkeypatch.chdir(folder)
        assert str(console.relative(file)) == shown
    assert console.relative(Path("/elsewhere/file")) == Path("/elsewhere/file")
    monkeypatch.chdir("/")
    assert console.relative(file) == file
