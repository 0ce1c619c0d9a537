"""torch.compile below a folder whose name a shell would read as several words, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slimqwen import variant
from slimqwen.vllm_plugin.patches.cpu import quoted_paths

STRANGE = "Martha's 100 % $HOME (new) é"

COMPILE = """
import sys, torch
if sys.argv[1] == "fixed":
    from slimqwen.vllm_plugin.patches.cpu import quoted_paths
    assert quoted_paths.is_needed() and quoted_paths.install() and not quoted_paths.install()
print(torch.compile(lambda x: x * 2 + 1)(torch.arange(3.0)).tolist())
"""


def compile_below(folder: Path, how: str) -> "subprocess.CompletedProcess[str]":
    environment = {
        **os.environ,
        "PYTHONPATH": str(variant.repository_root()),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
        "TMPDIR": str(folder),
        "TORCHINDUCTOR_VEC_ISA_OK": "1",  # else torch compiles a program to see whether this CPU runs it
    }
    words = [sys.executable, "-c", COMPILE, how]
    return subprocess.run(words, env=environment, cwd=folder, capture_output=True, text=True, timeout=600)


def test_graphs_are_compiled_below_any_folder(tmp_path: Path) -> None:
    folder = tmp_path / STRANGE
    folder.mkdir()
    done = compile_below(folder, "fixed")
    assert done.stdout == "[1.0, 3.0, 5.0]\n", done.stderr[-2000:]
    assert list((folder / "cache").rglob("*.so"))


def test_the_fix_is_still_needed(tmp_path: Path) -> None:
    """Fails when torch quotes its paths: the fix can go then."""
    folder = tmp_path / "my folder"
    folder.mkdir()
    assert "CppCompileError" in compile_below(folder, "stock").stderr


@pytest.mark.parametrize(
    ("folder", "is_needed"), [("plain-folder_1.2/é+@%", True), ("plain-folder_1.2+@%", False)]
)
def test_ordinary_paths_need_no_fix(monkeypatch: pytest.MonkeyPatch, folder: str, is_needed: bool) -> None:
    monkeypatch.setattr(sys, "prefix", "/usr")
    monkeypatch.setattr("tempfile.tempdir", "/tmp")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", f"/{folder}")
    assert quoted_paths.is_needed() is is_needed
