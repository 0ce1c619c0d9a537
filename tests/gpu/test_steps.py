"""What a run of `make gpu-check` skips, keeps and says, with steps that take no time."""

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slimqwen.errors import SlimqwenError
from slimqwen.records import provenance
from tests.gpu import steps
from tests.gpu.steps import Here, LeftOutError, Result, UnfinishedError, run_step

Body = Callable[[Here], str]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose steps run in this process and say "it works"."""
    (tmp_path / "slimqwen").mkdir()
    monkeypatch.setenv("REHEARSE", "1")
    does(monkeypatch, tmp_path, lambda here: "it works")
    return tmp_path


@pytest.mark.parametrize("module", sorted(set(steps.STEPS.values())))
def test_a_step_finds_what_it_imports(module: str) -> None:
    assert callable(importlib.import_module(f"tests.gpu.{module}").run)


def does(monkeypatch: pytest.MonkeyPatch, root: Path, body: Body) -> None:
    """From now on the step d of a repository does this."""
    monkeypatch.setitem(sys.modules, f"tests.gpu.{steps.STEPS['d']}", SimpleNamespace(run=body))

    def run_process(letter: str, root: Path, limit_s: float, log: Path) -> bool:
        steps.perform(letter, root, time.monotonic() + limit_s)
        return False

    monkeypatch.setattr(steps, "_run_process", run_process)


def kept(root: Path) -> dict[str, Any]:
    """The file of step d."""
    content: dict[str, Any] = json.loads(steps.result_file(root, None, "d").read_text())
    return content


def test_a_step_that_passed_is_skipped_until_code_variant_or_settings_change(root: Path) -> None:
    assert run_step("d", root)[:2] == ("passed", "it works")
    assert not run_step("d", root).again
    assert run_step("d", root, fresh=True).again
    for name in (
        "slimqwen/a.py",
        "experiments/v/config.env",
        "experiments/v/recipe.yaml",
        "eval/devices.yaml",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("changed")
        assert run_step("d", root).again, name
        assert not run_step("d", root).again
    (root / "README.md").write_text("changed")
    assert not run_step("d", root).again


def test_a_second_run_keeps_the_parts_that_were_found_and_tries_again_those_that_failed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def fail() -> dict[str, Any]:
        tried.append("second")
        raise SlimqwenError(f"{root}/weights is gone; make it anew")

    def body(here: Here) -> str:
        here.part("first", lambda: tried.append("first") or {"n": 1})
        here.part("second", fail)
        return "all tried"

    does(monkeypatch, root, body)
    for _ in range(2):
        result = run_step("d", root)
        assert result[:2] == ("failed", "second: weights is gone; make it anew; all tried")
    assert tried == ["first", "second", "second"]
    assert kept(root)["parts"]["first"] == {"n": 1}
    assert str(root) not in json.dumps(kept(root))


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (LeftOutError("no such card"), "left out"),
        (UnfinishedError("two of three"), "unfinished"),
        (AssertionError("wrong tokens"), "failed"),
        (RuntimeError("CUDA error"), "failed"),
    ],
)
def test_how_a_step_ends_is_its_status(
    root: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, status: str
) -> None:
    def body(here: Here) -> str:
        here.part("one", lambda: {"n": 1})
        raise error

    does(monkeypatch, root, body)
    result = run_step("d", root)
    assert (result.status, str(error) in result.line) == (status, True)
    assert kept(root)["parts"] == {"one": {"n": 1}}
    assert run_step("d", root).again


def test_a_process_that_is_killed_or_runs_out_of_time_has_kept_its_parts(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(timed_out: bool) -> Result:
        def run_process(letter: str, root: Path, limit_s: float, log: Path) -> bool:
            file = steps.result_file(root, None, letter)
            steps.write(file, {**json.loads(file.read_text()), "parts": {"one": {"n": 1}}})
            return timed_out

        monkeypatch.setattr(steps, "_run_process", run_process)
        return run_step("d", root)

    assert end(timed_out=True)[:2] == ("unfinished", "not finished in 120 s; parts done: one")
    status, line, *_ = end(timed_out=False)
    assert (status, line) == ("failed", "its process ended, see logs/gpu-check-d.log; parts done: one")
    assert kept(root)["packages"] == provenance.package_versions()


def test_the_process_of_a_step_is_interrupted_in_time(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(steps, "_CLEAN_UP_S", 5.0)
    (root / "tests" / "gpu").mkdir(parents=True)
    (root / "tests" / "gpu" / "steps.py").write_text(
        "import pathlib, time\n"
        "try:\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    pathlib.Path('interrupted').touch()\n"
    )
    assert steps._run_process("d", root, 7.0, root / "log")
    assert (root / "interrupted").exists()


def test_without_a_gpu_and_a_rehearsal_every_step_is_left_out(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REHEARSE")
    monkeypatch.setattr(steps, "choose_gpu", lambda name, root: None)
    status, line, *_ = run_step("d", root)
    assert (status, line) == ("left out", "no NVIDIA GPU here; REHEARSE=1 rehearses every step on the CPU")


def test_where_vllm_is_missing_only_the_steps_that_need_none_of_it_run(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps.importlib.util, "find_spec", lambda name: None)
    results = {letter: run_step(letter, root) for letter in steps.STEPS if letter != "g"}
    assert results.pop("d").status == "passed"
    assert {(result.status, result.line) for result in results.values()} == {
        ("left out", "vLLM is not importable here")
    }


def test_every_step_has_a_module_of_its_own() -> None:
    folder = Path(steps.__file__).parent
    others = {"steps", "conftest", *(file.stem for file in folder.glob("test_*.py"))}
    assert sorted(steps.STEPS.values()) == sorted({file.stem for file in folder.glob("*.py")} - others)
    assert sorted(steps.STEPS) == list("abcdefg")
    assert os.environ.get("STEPS") is None or set(os.environ["STEPS"].split(",")) <= set(steps.STEPS)


def test_a_step_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    sleeps = (
        "import sys, time; from pathlib import Path; from types import SimpleNamespace; from tests.gpu import steps\n"
        "def run(here): print('runs', flush=True); time.sleep(600)\n"
        "sys.modules['tests.gpu.stages'] = SimpleNamespace(run=run)\n"
        "steps.variants = SimpleNamespace(repository_root=lambda: Path(sys.argv[1]))\n"
        "steps.main('d', '600')\n"
    )
    file = steps.result_file(tmp_path, None, "d")
    file.parent.mkdir(parents=True)
    steps.write(file, {"parts": {}})
    step = subprocess.Popen(
        [sys.executable, "-c", sleeps, str(tmp_path)],
        env={**os.environ, "REHEARSE": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert step.stdin
    assert step.stdout
    assert step.stdout.readline() == b"runs\n"
    step.stdin.close()
    assert step.wait(60) == 1
    step.stdout.close()
