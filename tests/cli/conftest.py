"""Verbs in this process: as the shell calls them, or for what they say."""

import shlex
import sys
from collections.abc import Callable

import pytest
from typer.testing import CliRunner

from slimqwen.cli import app, console


@pytest.fixture
def run_here(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[object, str, str]]:
    """run_here(word, …): exit code, stdout and stderr of a command."""

    def run_words(*words: str) -> tuple[object, str, str]:
        monkeypatch.setattr(console.console, "file", sys.stdout)
        monkeypatch.setattr(sys, "argv", ["slimqwen", *words])
        with pytest.raises(SystemExit) as ended:
            app.run_command()
        return ended.value.code, *capfd.readouterr()

    return run_words


def said_by(command: str) -> str:
    """What a command that ends with 0 says; its errors are raised."""
    with console.console.capture() as shown:
        result = CliRunner().invoke(app.app, shlex.split(command), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return str(shown.get())


def run_on_one_line(command: str) -> tuple[int, str]:
    """Exit code of a command, and what it says and its errors, on one line."""
    with console.console.capture() as shown, console.errors.capture() as faults:
        result = CliRunner().invoke(app.app, shlex.split(command))
    return result.exit_code, " ".join(f"{shown.get()} {faults.get()}".split())
