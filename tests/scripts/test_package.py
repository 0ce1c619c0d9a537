"""`make package`: one wheel that holds what is shipped and needs nothing but Python until `slimqwen install`.

Then a person's way through it: from an empty folder to a published variant, without gate and server, which other tests
run; and the same folder with a newer package.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import package
import pytest

from slimqwen import variant
from slimqwen.checkpoint.files import tree_records
from slimqwen.workspace import HOME
from tests.evals.recipe_made import gated

Run = Callable[..., str]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    folder = tmp_path_factory.mktemp("package")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(package, "STAGING", folder / "staging")
        patched.setattr(package, "DIST", folder / "dist")
        assert package.main() == 0
    (file,) = (folder / "dist").glob("*.whl")
    return file


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that holds the wheel alone, read-only."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python3.*/site-packages")
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(site)
    return folder


def run(environment: Path, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [environment / "bin" / "python", "-c", "from slimqwen.entry import main; main()", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_it_holds_what_is_shipped_and_neither_records_nor_tests(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    shipped = {
        name.removeprefix("slimqwen/shipped/") for name in names if name.startswith("slimqwen/shipped/")
    }
    assert {
        "Makefile", "Dockerfile", "requirements/cpu.txt", "requirements/cuda.txt", "scripts/install.py",
        "eval/suites/core.yaml", "eval/devices.yaml", "eval/shapes/qwen3.5-4b.json",
        "experiments/tiny-best/recipe.yaml", "weights/tiny/model.safetensors", "weights/tiny/tokenizer.json",
    } <= shipped  # fmt: skip
    assert [name for name in shipped if name.startswith("experiments/") and "Z." in name] == []
    assert [name for name in names if "tests/" in name] == []
    assert wheel.stat().st_size <= package.LIMIT_BYTES
    metadata = (
        zipfile.ZipFile(wheel).read(next(name for name in names if name.endswith("/METADATA"))).decode()
    )
    assert "Requires-Dist" not in metadata
    assert "License-Expression: Apache-2.0" in metadata


def test_without_its_packages_every_verb_names_the_one_that_gets_them(environment, tmp_path):
    for verb in (["serve", "tiny"], ["--help"], []):
        done = run(environment, *verb, folder=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == (
            "error: the packages that slimqwen needs are not installed; run `slimqwen install`\n"
        )


def test_the_installation_runs_by_the_python_outside_the_environment(environment, tmp_path):
    done = run(environment, "install", "--help", folder=tmp_path)
    assert done.returncode == 0
    assert "--platform {cpu,cuda}" in done.stdout
    script = "import sys, install as i; print(i.IS_PACKAGE, i.VENV, i.lock_of('cpu').is_file(), sys.prefix)"
    (scripts,) = environment.glob("lib/python3.*/site-packages/slimqwen/shipped/scripts")
    said = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": str(scripts)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.split()[:3] == ["True", str(environment), "True"]
    assert said.stdout.split()[3] != str(environment)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel beside the packages of this environment: a folder for PYTHONPATH."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(folder)
    return folder


def running(installed: Path, workspace: Path) -> Run:
    """Runs a command of an installed package in a workspace; returns all that it says."""

    def run_there(command: str, code: int = 0) -> str:
        own = (HOME, "SLIMQWEN_CHECKOUT")
        environment = {name: value for name, value in os.environ.items() if name not in own}
        done = subprocess.run(
            [sys.executable, "-m", "slimqwen.cli", *command.split()],
            cwd=workspace,
            env={**environment, "PYTHONPATH": str(installed), "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == code, done.stdout
        return " ".join(done.stdout.split())

    return run_there


@pytest.fixture(scope="module")
def workspace(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A git repository with a variant of an own checkpoint, made by its recipe."""
    folder = tmp_path_factory.mktemp("walk")
    run = running(installed, folder)
    run("init ours")
    ours = folder / "ours"
    shutil.copytree(installed / "slimqwen" / "shipped" / "weights" / "tiny", folder / "model")
    git(ours, "init", "-q")
    git(ours, "add", ".")
    git(ours, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first")
    run = running(installed, ours)
    run(f"variant new --name base --checkpoint {folder / 'model'} --evaluation tinyworld")
    run("variant new --name mine --base base --stage quantise_lm_head")
    assert "next: `slimqwen gate mine`" in run("recipe run mine")
    return ours


def git(folder: Path, *words: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *words], capture_output=True, text=True, check=True
    ).stdout


@pytest.fixture
def copied(workspace: Path, tmp_path: Path) -> Path:
    """The workspace, for one test alone."""
    return shutil.copytree(workspace, tmp_path / "ours", symlinks=True)


def test_from_an_empty_folder_to_a_published_variant(installed, copied, tmp_path):
    before = tree_records(installed)
    run = running(installed, copied)
    assert "no gate record fits mine" in run(f"variant publish mine --to {tmp_path / 'out'}", code=2)
    gated(variant.load("mine", copied))
    assert "base states no licence" in run(f"variant publish mine --to {tmp_path / 'out'}", code=2)
    said = run(f"variant publish mine --to {tmp_path / 'out'} --licence apache-2.0")
    assert "next: `hf upload OWNER/out" in said
    subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=tmp_path / "out", check=True)
    run("report")
    assert "no fault" in run("report --check")
    assert git(copied, "status", "--short").split() == ["??", "experiments/base/", "??", "experiments/mine/"]
    run("variant remove mine --yes")
    run("variant remove base --yes")
    assert git(copied, "status", "--short") == ""
    assert tree_records(installed) == before


def test_after_an_upgrade_what_is_made_anew_is_said_before_and_old_records_are_read(
    installed, copied, tmp_path
):
    gated(variant.load("mine", copied))
    newer = shutil.copytree(installed, tmp_path / "newer")
    stage = newer / "slimqwen" / "recipe" / "stages" / "quantise_lm_head.py"
    line = "info.end - info.start,"
    assert stage.read_text().count(line) == 1
    stage.write_text(stage.read_text().replace(line, f"int({line[:-1]}),"))
    run = running(newer, copied)
    said = run("recipe run mine --dry-run")
    assert "changed: code." in said
    assert "quantise_lm_head run" in said
    assert "no fault" in run("report --check")
    assert "slimqwen's code or a package has changed since" in run("recipe run mine")
    assert "no ingredient has changed" in run("recipe run mine --dry-run")
