"""`slimqwen status`: what runs, what waits for what, and what fills the disk."""

import subprocess
import sys
from pathlib import Path

import pytest

from slimqwen.file_lock import name_owner
from slimqwen.report.status import list_disk_use, list_running

HOLDS = """
import sys
from pathlib import Path
from slimqwen.file_lock import hold_lock
print("asks", flush=True)
with hold_lock(Path("weights/store/.locks/abc")):
    print("holds", flush=True)
    sys.stdin.read()
"""
SERVES = """
import sys, setproctitle
setproctitle.setproctitle(f"{sys.executable} -m slimqwen.vllm_plugin.api_server --model /w/weights/mine --port 8123")
print("serves", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def start(tmp_path):
    """Starts a program that is called slimqwen, in the workspace; it ends with the test."""
    started = []

    def run(text: str, *words: str) -> subprocess.Popen:
        program = tmp_path / "bin" / "slimqwen"
        program.parent.mkdir(exist_ok=True)
        program.write_text(text)
        process = subprocess.Popen(
            [sys.executable, str(program), *words],
            cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        process.stdout.readline()
        return process

    yield run
    for process in started:
        process.communicate("")


def find(root: Path, process: subprocess.Popen):
    return next(row for row in list_running(root) if row.pid == process.pid)


def test_a_command_that_waits_names_the_lock_and_who_holds_it(tmp_path, start):
    first = start(HOLDS, "recipe", "run", "mine")
    assert first.stdout.readline() == "holds\n"
    second = start(HOLDS, "recipe", "run", "other")
    while (row := find(tmp_path, second)).waits_for is None:
        pass
    assert row.waits_for == f"weights/store/.locks/abc, held by {first.pid}"
    assert (row.what, row.owner, row.folder) == ("recipe run other", name_owner(first.pid), tmp_path)
    assert find(tmp_path, first).waits_for is None


def test_a_server_has_a_port(tmp_path, start):
    row = find(tmp_path, start(SERVES))
    assert (row.what, row.port) == ("server of mine", "8123")


def test_what_fills_the_disk_has_a_command_that_frees_it(tmp_path):
    for name, size in (
        ("weights/store/a/x", 9000),
        ("weights/own/x", 70000),
        (".cache/mine-" + "0" * 16 + "/x", 20000),
    ):
        file = tmp_path / name
        file.parent.mkdir(parents=True)
        file.write_bytes(bytes([1]) * size)
    (tmp_path / "weights" / "mine").symlink_to("store/a")
    found = list_disk_use(tmp_path)
    assert [name for name, _, _ in found] == ["weights/own", "compile caches", "outputs of recipes"]
    assert found[0][2] == "`rm -r weights/own`"
    assert found[0][1] >= 70000
