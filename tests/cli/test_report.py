"""`slimqwen report` with the options that do something else than build the page."""

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from slimqwen import variant
from slimqwen.cli import console
from slimqwen.cli.app import app
from slimqwen.cli.command_list import render_commands
from slimqwen.records import schemas
from slimqwen.records.collection import Problem
from slimqwen.report import checks, site


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository whose README says that nothing is measured, and whose list of commands is old."""
    monkeypatch.setattr(variant, "repository_root", lambda: tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(site, "build_page", lambda *_: pytest.fail("the page was built"))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "commands.md").write_text("old")
    (tmp_path / "README.md").write_text("<!-- table:variants -->\n<!-- end -->\n")
    return tmp_path


def run(*options):
    with console.console.capture() as shown:
        ended = CliRunner().invoke(app, ["report", *options])
    return ended.exit_code, shown.get()


def test_tables_and_the_list_of_commands_are_rewritten_once(repository):
    code, said = run("--tables")
    assert (code, said.splitlines()) == (
        0,
        ["rewritten: README.md", "rewritten: docs/commands.md", "rewritten: docs/stages.md"],
    )
    assert (repository / "docs" / "commands.md").read_text() == render_commands(get_command(app))
    assert "**Variants**" in (repository / "README.md").read_text()
    assert run("--tables") == (0, "")


@pytest.mark.parametrize(
    ("faults", "code", "end"),
    [((), 0, "3 records, no fault"), ((Problem("README.md", "is old; renew it"),), 1, "3 records, 1 faults")],
)
def test_the_exit_code_of_a_check_says_whether_there_is_a_fault(repository, monkeypatch, faults, code, end):
    monkeypatch.setattr(checks, "check_records", lambda root: checks.CheckResult(3, faults, ("A note.",)))
    ended, said = run("--check")
    assert ended == code
    assert said.splitlines()[-2:] == ["A note.", end]
    assert [line.split() for line in said.splitlines() if "README" in line] == (
        [["README.md", "is", "old", "renew", "it"]] if faults else []
    )


def test_options_together_do_all_that_they_say(repository, monkeypatch):
    monkeypatch.setattr(schemas, "write_schemas", lambda: repository / "schemas.json")
    monkeypatch.setattr(checks, "check_records", lambda root: checks.CheckResult(0, (), ()))
    code, said = run("--check", "--schemas", "--tables")
    assert code == 0
    assert [line.partition(":")[0] for line in said.splitlines()] == [
        "written",
        *3 * ["rewritten"],
        "0 records, no fault",
    ]
