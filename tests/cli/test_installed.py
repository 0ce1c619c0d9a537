"""`slimqwen` names an environment that `make install` would change."""

import json
import platform
import subprocess

import pytest

from slimqwen import variant
from slimqwen.cli.installed import describe_outdated


@pytest.fixture
def made(tmp_path):
    """An environment that `make install` has just made: its folder and its stamp."""
    environment = tmp_path / ".venv"
    (environment / "bin").mkdir(parents=True)
    (environment / "slimqwen-made-for").write_text(f"cpu {platform.python_version()}\n{tmp_path}")
    return environment, {"python": platform.python_version(), "ingredients": {}, "folder": str(tmp_path)}


@pytest.mark.parametrize(
    ("stamp", "said"),
    [
        ({}, None),
        (
            {"ingredients": {"requirements/cpu.txt": "0", "gone": "0"}},
            "was made before requirements/cpu.txt changed",
        ),
        ({"ingredients": "0"}, "was made by an earlier scripts/install.py"),
        ({"folder": "/there/before"}, "was made in /there/before"),
        ({"python": "3.9.1"}, f"was made with Python 3.9.1, this is {platform.python_version()}"),
        (None, "has not ended"),
    ],
)
def test_what_make_install_would_change_is_named(made, stamp, said):
    environment, fresh = made
    if stamp is not None:
        (environment / "slimqwen-install.json").write_text(json.dumps({**fresh, **stamp}))
    found = describe_outdated(environment, environment / "bin" / "slimqwen")
    assert found is None if said is None else found.endswith(said)


def test_a_copied_environment_that_runs_the_code_of_its_original_is_named(made, tmp_path):
    environment, fresh = made
    (environment / "slimqwen-install.json").write_text(json.dumps(fresh))
    copy = tmp_path / "copy" / ".venv"
    (copy / "bin").mkdir(parents=True)
    assert describe_outdated(environment, copy / "bin" / "slimqwen") is None  # a person's link to the program
    (copy / "slimqwen-made-for").touch()
    assert describe_outdated(environment, copy / "bin" / "slimqwen") == (
        f"{copy} is a copy of {environment} and runs the code of that one"
    )


def test_an_environment_that_a_person_made_is_left_alone(tmp_path):
    assert describe_outdated(tmp_path, tmp_path / "bin" / "slimqwen") is None


def test_make_makes_an_environment_anew_that_was_made_in_another_folder(tmp_path):
    makefile = variant.repository_root() / "Makefile"
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "slimqwen-install.json").touch()
    for folder, installs in ((str(tmp_path), False), ("/there/before", True)):
        (tmp_path / ".venv" / "slimqwen-made-for").write_text(f"cpu 3.11.7\n{folder}")
        planned = subprocess.run(
            ["make", "-nf", makefile, "serve"], cwd=tmp_path, capture_output=True, text=True
        )
        assert ("scripts/install.py" in planned.stdout) is installs
