"""Tests see what git tracks, in whatever state a person's checkout is."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tracked_copy

HERE = Path(__file__).parent
TRACKED = {
    "pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["."]\naddopts = "--import-mode=importlib"\n',
    "docs/list.md": "shipped\n",
    "experiments/shipped/config.env": "VLLM_MAX_NUM_SEQS=8\n",
    "experiments/shipped/quality_1.json": "{}\n",
    "weights/tiny/model.safetensors": "weights\n",
    "slimqwen/__init__.py": "",
    "slimqwen/code.py": "VALUE = 1\n",
    "tests/test_seen.py": """
from pathlib import Path
import json, os, subprocess, sys
ROOT = Path(__file__).parents[1]
def test_seen():
    assert Path.cwd().is_relative_to(ROOT)
    read = "import slimqwen.code; print(slimqwen.code.VALUE)"
    value = subprocess.run([sys.executable, "-c", read], cwd="/", capture_output=True, text=True).stdout
    names = [name for name in ROOT.rglob("*") if name.is_file() and not {".git", "__pycache__"} & {*name.parts}]
    seen = {str(name.relative_to(ROOT)): name.read_text() for name in names}
    Path(os.environ["SEEN"]).write_text(json.dumps([value, seen]))
""",
}  # fmt: skip


def run_git(root, *words):
    identity = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    subprocess.run(["git", "-C", root, *identity, *words], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path):
    root = tmp_path / "check out"
    for name, text in TRACKED.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    shutil.copy(HERE.parent / "conftest.py", root)
    shutil.copy(HERE / "tracked_copy.py", root / "tests")
    (root / ".gitignore").write_text(".cache/\n/weights/*\n!/weights/tiny/\n*.json\n")
    run_git(root, "init", "-q")
    run_git(root, "add", "-f", ".")
    run_git(root, "commit", "-qm", "shipped")
    return root


def seen_in(root, *arguments, folder="."):
    """What a child of a test imports, and the texts of the files that a test finds."""
    seen = root.parent / "seen"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLIMQWEN_")}
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=root / folder, env=environment | {"SEEN": str(seen)}, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    value, texts = json.loads(seen.read_text())
    return int(value), {name: text for name, text in texts.items() if name in TRACKED or "mine" in name}


def write(root, name, text="mine"):
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


MESS = {
    "weights of one's own": lambda root: write(root, "weights/mine/model.safetensors"),
    "other bytes in shipped weights": lambda root: write(root, "weights/tiny/model.safetensors"),
    "a variant of one's own": lambda root: write(root, "experiments/mine/config.env"),
    "a record that git ignores": lambda root: write(root, "experiments/shipped/mine_2.json"),
    "a record that was changed": lambda root: write(root, "experiments/shipped/quality_1.json"),
    "settings that were edited": lambda root: write(root, "experiments/shipped/config.env"),
    "a shipped variant that was removed": lambda root: shutil.rmtree(root / "experiments" / "shipped"),
    "a document that a verb rewrote": lambda root: write(root, "docs/list.md"),
    "a cache": lambda root: write(root, ".cache/mine/journal"),
    "all of it staged but a file": lambda root: (run_git(root, "add", "-A"), write(root, "docs/list.md")),
}


@pytest.mark.parametrize("mess", MESS)
def test_tests_see_nothing_that_a_person_made_changed_or_deleted(mess, checkout):
    MESS[mess](checkout)
    assert seen_in(checkout) == (1, TRACKED)


def test_code_is_tested_as_it_lies_in_the_checkout(checkout):
    write(checkout, "slimqwen/code.py", "VALUE = 2\n")
    write(checkout, "slimqwen/mine.py")
    assert seen_in(checkout) == (2, TRACKED | {"slimqwen/code.py": "VALUE = 2\n", "slimqwen/mine.py": "mine"})
    (checkout / "slimqwen" / "mine.py").unlink()
    assert "slimqwen/mine.py" not in seen_in(checkout)[1]


def test_what_was_added_to_git_is_tested(checkout):
    write(checkout, "experiments/mine/config.env")
    run_git(checkout, "add", ".")
    assert seen_in(checkout)[1] == TRACKED | {"experiments/mine/config.env": "mine"}


@pytest.mark.parametrize(
    ("arguments", "folder"),
    [(["-n", "2"], "."), (["{root}/tests/test_seen.py"], "docs"), (["test_seen.py::test_seen"], "tests")],
)
def test_every_way_to_start_pytest_ends_in_the_copy(arguments, folder, checkout):
    shutil.rmtree(checkout / "experiments")
    words = [word.format(root=checkout) for word in arguments]
    assert seen_in(checkout, *words, folder=folder) == (1, TRACKED)


def test_two_runs_at_once_have_a_copy_each(checkout):
    folders = [tracked_copy.lock_copy(checkout / ".cache" / "tests") for _ in range(2)]
    assert [folder.name for folder in folders] == ["1", "2"]


def test_results_are_written_where_one_asks(checkout):
    seen_in(checkout, "--junitxml=result.xml")
    assert (checkout / "result.xml").is_file()
