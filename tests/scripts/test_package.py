"""`make package`: one wheel that holds what is shipped and needs nothing but Python until `slimqwen install`."""

import subprocess
import sys
import zipfile
from pathlib import Path

import package
import pytest


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
