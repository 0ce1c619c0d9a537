"""The scripts as a person meets them: one line for what they can expect to go wrong, and help for every one."""

import importlib.util
import re
import subprocess
import sys

import pytest

from slimqwen import variant

SCRIPTS = variant.repository_root() / "scripts"
NAMES = sorted(file.stem for file in SCRIPTS.glob("[!_]*.py"))


def _run(name, *arguments):
    return subprocess.run(
        [sys.executable, SCRIPTS / f"{name}.py", *arguments], capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("serve", ("--variant", "nope")),
        ("eval_quality", ("--variant", "nope")),
        ("eval_latency", ("--variant", "nope")),
        ("compare", ("tiny", "nope")),
        ("run_recipe", ("run", "--variant", "nope")),
        ("llmcompressor_calibrate", ("--variant", "nope")),
    ],
)
def test_a_variant_that_does_not_exist_is_one_line_and_exit_code_2(script, arguments):
    ended = _run(script, *arguments)

    assert ended.returncode == 2
    assert ended.stderr.splitlines() == [
        "error: there is no variant 'nope' under experiments/; `make variants` lists them"
    ]


def test_every_make_target_calls_a_script_that_exists():
    makefile = (variant.repository_root() / "Makefile").read_text()

    called = {word for line in makefile.splitlines() for word in line.split() if word.startswith("scripts/")}
    assert called
    assert {word.rstrip(";") for word in called} <= {f"scripts/{name}.py" for name in NAMES}


TARGETS = re.findall(r"^([a-z-]+):", (variant.repository_root() / "Makefile").read_text(), re.MULTILINE)


def test_make_help_lists_every_target():
    listed = subprocess.run(
        ["make", "-C", variant.repository_root(), "help"], capture_output=True, text=True, check=True
    ).stdout
    assert len(TARGETS) > 20
    assert [target for target in TARGETS if f"make {target} " not in listed] == []


def test_every_target_makes_the_environment_where_it_is_missing(tmp_path):
    (tmp_path / "Makefile").write_bytes((variant.repository_root() / "Makefile").read_bytes())
    for target in set(TARGETS) - {"help"}:
        plan = subprocess.run(
            ["make", "-n", target], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout
        first = next(line for line in plan.splitlines() if ".venv" in line or "install.py" in line)
        assert first.strip() == "python3 scripts/install.py", target


@pytest.fixture
def bare_copy(tmp_path):
    """What scripts/install.py reads, in a repository without a .venv."""
    root = tmp_path / "copy"
    for name in ("scripts/install.py", "requirements/cpu.txt", "pyproject.toml"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes((variant.repository_root() / name).read_bytes())
    return root


def test_an_environment_of_another_python_or_platform_is_made_anew(bare_copy, monkeypatch):
    spec = importlib.util.spec_from_file_location("install", bare_copy / "scripts/install.py")
    install = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(install)
    made = []

    def create(folder, with_pip, clear):
        made.append(clear)
        install.PYTHON.parent.mkdir(parents=True, exist_ok=True)
        install.PYTHON.touch()

    monkeypatch.setattr(install.venv, "create", create)
    install.make_environment("cpu")
    install.make_environment("cpu")
    assert made == [False]
    install.make_environment("cuda")
    assert made == [False, True]
    install.MADE_FOR.write_text("cuda 3.11.2")
    install.make_environment("cuda")
    install.make_environment("cuda")
    assert made == [False, True, True]
    monkeypatch.setattr(install.sys, "prefix", str(install.VENV))
    with pytest.raises(install.InstallError, match="deactivate"):
        install.make_environment("cpu")
    assert len(made) == 3


def test_installing_twice_does_nothing_the_second_time():
    ended = _run("install")

    assert ended.returncode == 0
    assert "up to date" in ended.stdout


def test_an_unfit_python_is_refused_in_one_line(bare_copy):
    script = bare_copy / "scripts/install.py"
    needs_another = script.read_text().replace(
        "MINIMUM, BELOW = (3, 11), (3, 14)", "MINIMUM, BELOW = (4, 0), (5, 0)"
    )
    script.write_text(needs_another)

    ended = subprocess.run([sys.executable, script], capture_output=True, text=True)

    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
    assert "does not fit" in ended.stderr
    assert not (bare_copy / ".venv").exists()


def test_no_compiler_is_refused_in_one_line(bare_copy, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))

    ended = subprocess.run(
        [sys.executable, bare_copy / "scripts/install.py", "--platform", "cpu"],
        capture_output=True,
        text=True,
    )

    assert (ended.returncode, len(ended.stderr.splitlines())) == (2, 1)
    assert "no C compiler" in ended.stderr
    assert not (bare_copy / ".venv").exists()
