"""`scripts/install.py` as a person meets it: one line for what they can expect to go wrong."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
import zipfile

import pytest

from slimqwen import variant


@pytest.fixture
def bare_copy(tmp_path):
    """What scripts/install.py reads, in a repository without a .venv."""
    root = tmp_path / "copy"
    checkout = variant.repository_root()
    for file in (
        *checkout.glob("scripts/*.py"),
        *checkout.glob("requirements/*"),
        checkout / "pyproject.toml",
    ):
        copied = root / file.relative_to(checkout)
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_bytes(file.read_bytes())
    return root


def script_of(root):
    """scripts/install.py of a copy, as a module."""
    spec = importlib.util.spec_from_file_location("install", root / "scripts/install.py")
    install = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(install)
    return install


def test_an_environment_of_another_python_or_platform_is_made_anew(bare_copy, monkeypatch):
    install = script_of(bare_copy)
    made = []

    def create(folder, clear, **_):
        made.append(clear)
        install.PYTHON.parent.mkdir(parents=True, exist_ok=True)
        install.PYTHON.touch()

    monkeypatch.setattr(install.venv, "create", create)
    install.make_environment("cpu")
    install.make_environment("cpu")
    assert made == [False]
    install.make_environment("cuda")
    assert made == [False, True]
    for made_for in (f"cuda 3.11.2\n{install.ROOT}", f"cuda {sys.version.split()[0]}\n/where/it/was/before"):
        install.MADE_FOR.write_text(made_for)
        install.make_environment("cuda")
        install.make_environment("cuda")
    assert made == [False, True, True, True]
    monkeypatch.setattr(install.sys, "prefix", str(install.VENV))
    with pytest.raises(install.InstallError, match="deactivate"):
        install.make_environment("cpu")
    assert len(made) == 4


@pytest.fixture
def index_with_a_cpu_torch(tmp_path, monkeypatch):
    """A package index whose only torch is a CPU build of the lock's version."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    info = "torch-2.14.0+cpu.dist-info"
    files = {
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: torch\nVersion: 2.14.0+cpu\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(folder / "torch-2.14.0+cpu-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
        wheel.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in files))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    # A machine may constrain versions of torch, and pip's words are others then.
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_CONSTRAINT", raising=False)
    return folder


@pytest.mark.parametrize(
    ("pin", "said"),
    [
        (None, "No matching distribution found for torch===2.14.0"),
        ("torch==2.14.0", "2.14.0.cpu is a CPU build"),
    ],
    ids=["the lock's pin", "a pin that a CPU build satisfies"],
)
def test_a_cuda_environment_never_takes_a_cpu_build_of_torch(bare_copy, index_with_a_cpu_torch, pin, said):
    if pin is not None:
        (bare_copy / "requirements/cuda.txt").write_text(f"{pin}\ntorchvision==0.29.0\n")
    install = script_of(bare_copy)
    install.LOG.parent.mkdir()
    with pytest.raises(install.InstallError, match=said) as refused:
        install.install("cuda", [])
    assert "\n" not in str(refused.value)
    assert not install.STAMP.exists()


def test_an_environment_that_a_link_leads_to_is_not_touched(bare_copy, tmp_path):
    kept = tmp_path / "elsewhere" / "bin" / "python"
    kept.parent.mkdir(parents=True)
    kept.touch()
    link = bare_copy / ".venv"
    link.symlink_to(tmp_path / "elsewhere")
    command = [sys.executable, bare_copy / "scripts/install.py", "--platform", "cpu"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 2
    assert re.fullmatch(r"error: \.venv is a link to .*; run `make install` there, .*\n", ended.stderr)
    assert kept.exists()


def test_an_unfit_python_is_refused_in_one_line(bare_copy):
    script = bare_copy / "scripts/install.py"
    needs_another = script.read_text().replace(
        "MINIMUM, BELOW = (3, 11), (3, 14)", "MINIMUM, BELOW = (4, 0), (5, 0)"
    )
    script.write_text(needs_another)

    ended = subprocess.run([sys.executable, script], capture_output=True, text=True)

    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
    assert "is not supported" in ended.stderr
    assert not (bare_copy / ".venv").exists()


@pytest.mark.parametrize(
    ("name", "platform", "signs"),
    [
        ("50% done", "cpu", "'%'"),
        ("a:b", "cpu", "':'"),
        ('a "new" $HOME', "cpu", "'\"' '$'"),
        ("two\nlines", "cpu", r"'\n'"),
        ("my models", "cuda", "' '"),
        ("modèles", "cuda", "'è'"),
    ],
)
def test_a_path_that_a_tool_would_misread_is_refused_in_one_line(bare_copy, name, platform, signs):
    root = bare_copy.rename(bare_copy.parent / name)
    ended = subprocess.run(
        [sys.executable, root / "scripts/install.py", "--platform", platform], capture_output=True, text=True
    )
    assert (ended.returncode, len(ended.stderr.splitlines())) == (2, 1)
    assert f"misread {signs} in the path of this checkout" in ended.stderr
    assert not (root / ".venv").exists()


@pytest.mark.parametrize("name", ["Martha's (new) é e\u0301 & co~1,a=b+c@d", "plain-path_1.2"])
def test_other_letters_of_a_path_are_no_obstacle(bare_copy, name, monkeypatch):
    install = script_of(bare_copy.rename(bare_copy.parent / name))
    monkeypatch.setattr(install.shutil, "which", lambda name: None)
    with pytest.raises(install.InstallError, match="no C compiler"):
        install.check_machine("cpu")


def test_what_nobody_expected_is_one_line_and_a_log(bare_copy, monkeypatch, capsys):
    install = script_of(bare_copy)
    monkeypatch.setattr(sys, "argv", ["install.py", "--platform", "cpu"])
    for error, code, said in (
        (RuntimeError("odd"), 1, f"error: unexpected RuntimeError: odd; the traceback is in {install.LOG}\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ):

        def fail(*_, error=error):
            raise error

        monkeypatch.setattr(install, "check_machine", fail)
        assert install.main() == code
        assert capsys.readouterr().err == said
    assert "RuntimeError: odd" in install.LOG.read_text()


@pytest.mark.parametrize(
    ("script", "is_found"),
    [
        ("echo 'GPU 0: NVIDIA A40 (UUID: GPU-1)'", True),
        ("echo 'NVIDIA-SMI has failed because it could not communicate with the driver'; exit 9", False),
        ("echo 'No devices found.'", False),
        (None, False),
    ],
)
def test_a_tool_that_lists_no_gpu_is_no_gpu(bare_copy, tmp_path, monkeypatch, script, is_found):
    install = script_of(bare_copy)
    monkeypatch.setattr(install, "DRIVER", tmp_path / "no driver")
    if script:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert install.has_gpu() is is_found


def test_an_extra_stays_installed_and_is_named_once(bare_copy, monkeypatch, capsys):
    install = script_of(bare_copy)

    def make_environment(*_):
        install.PYTHON.parent.mkdir(parents=True, exist_ok=True)
        install.PYTHON.touch()

    monkeypatch.setattr(install, "make_environment", make_environment)
    steps = (
        "check_machine",
        "forget_unfinished",
        "require_build",
        "name_vllm",
        "mend_torchvision",
        "try_import",
    )
    for name in steps:
        monkeypatch.setattr(install, name, lambda *_: None)
    asked = []

    class Client:
        def __init__(self, *_):
            pass

        def fetch_uv(self, *_):
            pass

        def install(self, what, *_):
            asked.append(what)

    monkeypatch.setattr(install, "PackageClient", Client)
    always = ["torch (cpu)", "setuptools", "packages of cpu.txt"]
    for options, packages in (
        ([], [*always, "slimqwen"]),
        (["--extras", "ray"], [*always, "packages of ray.txt", "slimqwen"]),
        ([], []),
    ):
        asked.clear()
        monkeypatch.setattr(sys, "argv", ["install.py", "--platform", "cpu", *options])
        assert install.main() == 0
        assert asked == packages
    assert capsys.readouterr().out.splitlines()[-1] == "environment is up to date (cpu): .venv"


def test_a_package_that_an_interruption_left_unfinished_is_installed_again(bare_copy, monkeypatch):
    install = script_of(bare_copy)
    monkeypatch.setattr(install, "site_packages", lambda: bare_copy)
    for name, files in {"whole": ["whole.py"], "halved": ["halved.py", "gone.py"], "cut": None}.items():
        info = bare_copy / f"{name}-1.dist-info"
        info.mkdir()
        (bare_copy / f"{name}.py").touch()
        if files:
            rows = [*files, "__pycache__/never_compiled.pyc"]
            (info / "RECORD").write_text("".join(f"{file},,\n" for file in rows))
    install.forget_unfinished()
    assert [info.name for info in bare_copy.glob("*.dist-info")] == ["whole-1.dist-info"]


def test_a_second_make_install_waits_and_does_nothing(bare_copy, monkeypatch):
    install = script_of(bare_copy)
    waits = threading.Event()
    monkeypatch.setattr(install, "show", lambda text: waits.set() if "waiting for it" in text else None)
    monkeypatch.setattr(install, "check_machine", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["install.py", "--platform", "cpu"])
    with install.alone():
        other = threading.Thread(target=install.main)
        other.start()
        assert waits.wait(60)
        monkeypatch.setattr(install, "install", lambda *_: pytest.fail("installed twice"))
        stamp = {
            "platform": "cpu",
            "python": sys.version.split()[0],
            "extras": [],
            "folder": str(install.ROOT),
        }
        install.PYTHON.parent.mkdir(parents=True)
        install.PYTHON.touch()
        install.STAMP.write_text(json.dumps({**stamp, "ingredients": install.ingredients("cpu", [])}))
    other.join()


def test_an_extra_adds_only_what_the_platforms_locks_lack():
    folder = variant.repository_root() / "requirements"
    names = {
        file.stem: {line.partition("==")[0].lower() for line in file.read_text().splitlines() if "==" in line}
        for file in folder.glob("*.txt")
    }
    assert not names["ray"] & (names["cpu"] | names["cuda"])
    assert {"click", "filelock", "jsonschema", "packaging", "protobuf", "pyyaml", "requests"} <= names[
        "cpu"
    ] & names["cuda"]
