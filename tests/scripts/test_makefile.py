"""The Makefile: few targets, one line each, and each gives the verb that it stands for."""

import re
import shlex
import subprocess

import pytest
from typer.main import get_command

from slimqwen import variant
from slimqwen.cli.app import app

ROOT = variant.repository_root()
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = re.findall(r"^([a-z-]+):.*\n\t", MAKEFILE, re.MULTILINE)
VARIABLES = [
    "PORT=1",
    "SUITE=core",
    "LIMIT=5",
    "A=tiny",
    "B=tiny-awq",
    "REQUIRE_BAKED=1",
    "REQUIRE_PLAN=1",
    "CACHE=c.tar.gz",
    "FULL=1",
    "MINUTES=5",
    "BASE=tiny",
    "GPU=a10g",
    "TRIALS=3",
]


def plan(target, *variables, folder=ROOT):
    """The shell lines that make would run."""
    # `make test` runs this as a make within a make, which names its folder.
    command = ["make", "-n", "--no-print-directory", target, *variables]
    planned = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return planned.stdout.splitlines()


def test_there_are_30_targets_at_most_of_one_line_each():
    assert 20 < len(TARGETS) <= 30
    assert len(TARGETS) == len(set(TARGETS))
    assert re.findall(r"^\t.*\n\t", MAKEFILE, re.MULTILINE) == []


def test_make_help_lists_every_target():
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert [target for target in TARGETS if f"make {target} " not in listed] == []


@pytest.mark.parametrize("variables", [(), VARIABLES])
@pytest.mark.parametrize("target", TARGETS)
def test_a_target_calls_a_verb_that_exists_with_options_that_it_has(target, variables):
    for line in plan(target, *variables):
        words = shlex.split(line)
        if ".venv/bin/slimqwen" in words:
            arguments = words[words.index(".venv/bin/slimqwen") + 1 :]
            get_command(app).main([*arguments, "--help"], standalone_mode=False, prog_name="slimqwen")


def test_variables_of_make_become_options_of_the_verb():
    (line,) = plan("eval-quality", "VARIANT=tiny-awq", "SUITE=core", "LIMIT=5")
    assert shlex.split(line)[1:] == [
        *["eval", "quality", "--variant", "tiny-awq", "--suite", "core", "--limit", "5"]
    ]


@pytest.mark.parametrize("target", sorted(set(TARGETS) - {"help", "pack"}))
def test_a_target_makes_the_environment_where_it_is_missing(tmp_path, target):
    (tmp_path / "Makefile").write_text(MAKEFILE)
    first = next(line for line in plan(target, folder=tmp_path) if ".venv" in line or "install.py" in line)
    assert first.strip() == "python3 scripts/install.py"
