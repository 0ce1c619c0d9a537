"""vLLM's entry is called with the garbage collector back on, its modules frozen and one OpenMP thread."""

import os
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from slimqwen.vllm_plugin import api_server

PROBE = """
import gc
from slimqwen.vllm_plugin import api_server
from slimqwen.vllm_plugin.patches.cpu import forked_processes
from vllm.entrypoints.launchers.api_server import entry
import torch

def main():
    print("state:", gc.isenabled(), gc.get_freeze_count() > 10_000, torch.get_num_threads(), forked_processes._allowed)

entry.main = main
api_server.main()
"""

REFUSED = """
import pydantic
from slimqwen.errors import SlimqwenError
from slimqwen.vllm_plugin import api_server

def refuse():
    raise {fault}

api_server.import_server = refuse
api_server.main()
"""


def run(code, **environment):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, **environment)


def test_vllm_is_called_frozen_collecting_and_with_one_thread():
    probe = run(PROBE)
    assert "state: True True 1 True" in probe.stdout, probe.stderr


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("ValueError('no handler') from ValueError('no level LOUD')", "no handler: no level LOUD; change"),
        ("ValueError('two\\nlines.')", "two lines; change the value"),
        ("KeyError('invalid tool call parser')", "invalid tool call parser; change"),
        (
            "pydantic.TypeAdapter(int).validate_python('x')",
            "Input should be a valid integer, unable to parse",
        ),
    ],
)
def test_a_value_that_vllm_refuses_is_one_line(fault, message):
    probe = run(REFUSED.format(fault=fault))
    (line,) = [line for line in probe.stderr.splitlines() if line.startswith("error: ")]
    assert f"vLLM refuses its configuration: {message}" in line
    assert (probe.returncode, "Traceback" in probe.stderr, "leaked" in probe.stderr) == (1, False, False)


def test_an_expected_error_is_one_line():
    probe = run(REFUSED.format(fault="SlimqwenError('the patch does not fit; adapt it')"))
    assert (probe.returncode, probe.stderr) == (1, "error: the patch does not fit; adapt it\n")


def test_a_failure_of_the_engine_keeps_its_traceback():
    probe = run(REFUSED.format(fault="RuntimeError('the engine died')"))
    assert probe.returncode == 1
    assert "RuntimeError: the engine died" in probe.stderr
    assert "Traceback" in probe.stderr


def test_the_sockets_of_a_server_go_with_it():
    code = """
import os, pathlib
from slimqwen.vllm_plugin import api_server
with api_server._own_sockets():
    folder = pathlib.Path(os.environ["VLLM_RPC_BASE_PATH"])
    (folder / "socket").touch()
print(folder.parent, folder.exists())
"""
    probe = run(code, env={"TMPDIR": "/var/tmp", "PYTHONPATH": ":".join(sys.path)})
    assert probe.stdout.split() == ["/var/tmp", "False"], probe.stderr


def test_to_name_the_module_imports_nothing_heavy():
    named = run(
        "import sys, slimqwen.vllm_plugin.api_server; print('torch' in sys.modules, 'vllm' in sys.modules)"
    )
    assert named.stdout.split() == ["False", "False"]


def test_where_no_folder_takes_sockets_the_cure_is_to_name_one(monkeypatch):
    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
    monkeypatch.setattr(api_server.os, "access", lambda folder, mode: False)
    said = r"a writable folder .* at most 50 bytes, and none of .*/tmp.*; set TMPDIR"
    with pytest.raises(SystemExit, match=said), api_server._own_sockets():
        pass
    monkeypatch.setattr(api_server.os, "access", lambda folder, mode: folder == "/var/tmp")
    with api_server._own_sockets():
        assert Path(os.environ["VLLM_RPC_BASE_PATH"]).parent == Path("/var/tmp")


@pytest.mark.parametrize("folders", [1, 8])
def test_sockets_have_short_paths_below_a_temporary_folder_of_any_length(tmp_path, monkeypatch, folders):
    temporary = tmp_path.joinpath(*["a" * 20] * folders) if folders > 1 else Path("/var/tmp")
    temporary.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
    with api_server._own_sockets(), socket.socket(socket.AF_UNIX) as listener:
        folder = Path(os.environ["VLLM_RPC_BASE_PATH"])
        listener.bind(f"{folder}/{uuid.uuid4()}")
        assert (folder.parent == temporary) is (folders == 1)
    assert not folder.exists()
