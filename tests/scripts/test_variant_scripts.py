"""The scripts of a variant's life as a person meets them: what cannot be is one line, and nothing is written."""

import subprocess
import sys

import pytest

from slimqwen import variant

ROOT = variant.repository_root()
ENGINE = next((ROOT / "experiments" / "tiny").glob("engine_*.json"))


def run(name, *arguments):
    script = ROOT / "scripts" / f"{name}.py"
    return subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    ("script", "arguments", "told"),
    [
        ("new_variant", ("--name", "tiny", "--base", "tiny", "--hypothesis", "x"), "is there already"),
        ("new_variant", ("--name", "new", "--base", "tinny", "--hypothesis", "x"), "did you mean tiny?"),
        ("new_variant", ("--name", "new", "--base", "tiny", "--hypothesis", ""), "needs a hypothesis"),
        ("promote", ("--variant", "tiny"), "tiny is a baseline"),
        ("promote", ("--variant", "nope"), "there is no variant 'nope'"),
        ("replay", (str(ROOT / "experiments" / "tiny" / "quality_nope.json"),), "no such record"),
        ("replay", (str(ENGINE),), "quality and latency records can be replayed"),
        ("show_log", ("--variant", "nope"), "there is no variant 'nope'"),
        ("export_mlflow", ("--uri", "nonsense://x"), "check URI"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_2(script, arguments, told):
    ended = run(script, *arguments)
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
    assert ended.stderr.startswith("error: ")
    assert told in ended.stderr
    assert not (ROOT / "experiments" / "new").exists()


def test_the_log_shows_dates_and_findings():
    ended = run("show_log", "--variant", "tiny-awq", "--last", "2")
    assert ended.returncode == 0
    lines = ended.stdout.splitlines()
    assert lines[0].split()[:2] == ["ended", "(UTC)"]
    assert sum(line.startswith("20") for line in lines) == 2
