"""Servers that are forks of a process that has imported vLLM: they answer, and end with whoever started them."""

import json
import os
import re
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from slimqwen import host, variant
from slimqwen.processes import spawner, warm_worker
from slimqwen.processes.warm_worker import WarmWorker
from slimqwen.progress import Progress
from slimqwen.serving.command import ServerCommand
from slimqwen.serving.server import free_port, run_server, start_process
from tests.serving.real_server import ended

ROOT = Path(__file__).parents[2]
API_SERVER = ("python", "-m", "slimqwen.vllm_plugin.api_server", "--model", "x")


def test_only_servers_are_requested_from_a_spawner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawner, "_block", None)
    monkeypatch.setattr(spawner, "_requests", None)
    assert spawner.find_spawner(API_SERVER) is None
    with socket.socket() as requests:
        monkeypatch.setattr(spawner, "_requests", requests)
        assert spawner.find_spawner(API_SERVER) is requests
        assert spawner.find_spawner(("python", "-c", "pass")) is None


BEFORE = {"TORCH_LOGS": "+dynamo", "PATH": os.environ["PATH"]}
SPAWNER = f"""
import os, socket
from slimqwen.processes import spawner
from slimqwen.vllm_plugin import api_server

def run_fork(*lifelines):
    os.write(1, b"forked")
    os._exit(0)

api_server.run_fork = run_fork
os.environ.clear()
os.environ.update({BEFORE}, TORCH_SET="1")
spawner._fork_servers(socket.socket(fileno=os.dup(0)), {BEFORE})
"""


@pytest.fixture(scope="module")
def requests() -> Iterator[socket.socket]:
    """The socket of a spawner without vLLM, whose import found `BEFORE` and set TORCH_SET."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with ours, theirs, subprocess.Popen([sys.executable, "-c", SPAWNER], cwd=ROOT, stdin=theirs.fileno()):
        theirs.close()
        yield ours
        ours.close()


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({}, "forked"),
        ({"VLLM_CACHE_ROOT": "/x", "TORCHINDUCTOR_CACHE_DIR": "/x", "OMP_NUM_THREADS": "1"}, "forked"),
        ({"TORCH_SET": "1"}, "forked"),
        ({"SLIMQWEN_POLICY": "{}"}, "forked"),
        ({"VLLM_USE_MODELSCOPE": "1"}, "executed"),
        ({"TORCHINDUCTOR_MAX_AUTOTUNE": "1"}, "executed"),
        ({"TRITON_INTERPRET": "1"}, "executed"),
        ({"MKL_NUM_THREADS": "1"}, "executed"),
        ({"TORCH_LOGS": ""}, "executed"),
    ],
)
def test_a_fork_with_a_variable_that_an_import_may_have_read_executes_its_command(
    requests: socket.socket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, str],
    outcome: str,
) -> None:
    monkeypatch.setattr(spawner, "_requests", requests)
    python, log = tmp_path / "python", tmp_path / "log"
    python.write_text("#!/bin/sh\ntest -e /dev/fd/$SLIMQWEN_LIFELINE && printf executed\n")
    python.chmod(0o755)
    argv = (str(python), *API_SERVER[1:])
    with (
        log.open("wb") as output,
        start_process(argv, environment=BEFORE | changes, folder=tmp_path, output=output) as server,
    ):
        select.select([server.lifeline], [], [])
    assert log.read_text() == outcome


def test_a_process_that_inherits_the_socket_requests_servers_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import os\n"
        "from slimqwen.processes import spawner\n"
        f"spawner.find_spawner({API_SERVER!r}).send(' '.join(os.environ).encode())\n"
    )
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with ours, theirs:
        monkeypatch.setattr(spawner, "_requests", theirs)
        variables, descriptors = spawner.pass_on()
        command = [sys.executable, "-c", code]
        subprocess.run(command, cwd=ROOT, env=os.environ | variables, pass_fds=descriptors, check=True)
        names = ours.recv(1 << 20).decode().split()
    assert variables.keys().isdisjoint(names)  # nothing that the process starts takes the number for its own


def test_without_a_spawner_nothing_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawner, "_requests", None)
    assert spawner.pass_on() == ({}, ())


def ask(log: Path, seconds: float, progress: Progress) -> dict[str, Any]:
    """Start the embedded model, ask it for two tokens, and stay for a while."""
    command = ServerCommand.resolve(variant.load("tiny"), port=free_port(), platform="cpu")
    with run_server(command, log=log) as server:
        progress(str(server.pid), 1, 1)
        body = {"model": server.model, "prompt": "a", "max_tokens": 2, "temperature": 0}
        answer = httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=60, trust_env=False)
        process = psutil.Process(server.pid)
        parent = process.parent()
        assert parent is not None
        facts = {
            "text": answer.json()["choices"][0]["text"],
            "server": server.pid,
            "command": process.cmdline(),
            "parent": parent.cmdline(),
            "leads_its_group": os.getpgid(server.pid) == server.pid,
        }
        time.sleep(seconds)
    return facts


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmWorker]:
    environment = os.environ | host.preloaded_libraries(os.environ)
    with (
        (tmp_path_factory.mktemp("warm") / "log").open("wb") as output,
        warm_worker.started(environment, output, forks_servers=True) as worker,
    ):
        yield worker


def receive(worker: WarmWorker, kind: str) -> tuple[Any, ...]:
    """The content of the next message of a kind."""
    while (message := worker.messages.recv())[0] != kind:
        assert message[0] not in ("failed", "refused"), message
    return tuple(message[1:])


@pytest.mark.engine
def test_a_job_s_server_is_a_fork_and_no_process_of_it_outlives_the_server(
    warm: WarmWorker, tmp_path: Path
) -> None:
    job = psutil.Process(warm.give(os.environ, tmp_path, ask, tmp_path / "log", 600))
    activity, *_ = receive(warm, "progress")
    server = psutil.Process(int(activity))
    parent = server.parent()
    assert parent is not None
    assert "slimqwen.processes.warm_worker" in parent.cmdline()
    processes = [server, *server.children(recursive=True)]
    assert {"VLLM::EngineCore", "VLLM::Worker"} <= {process.name() for process in processes}
    server.kill()
    assert ended(processes, 10)
    with suppress(psutil.NoSuchProcess):
        job.kill()
    # The job of a killed server may say that it failed before it is killed too.
    while warm.messages.recv()[0] != "ended":
        pass


@pytest.mark.engine
def test_a_block_has_one_spawner_made_with_its_first_server_and_ended_with_it(tmp_path: Path) -> None:
    code = f"""
import json, pathlib, psutil
from slimqwen.processes import spawner
from tests.processes.test_spawner import API_SERVER, ask

with spawner.share_spawner():
    made_before = len(psutil.Process().children())
    log = pathlib.Path({str(tmp_path / "log")!r})
    facts = ask(log, 0, lambda *_: None)
    with spawner.share_spawner():
        same = spawner.find_spawner(API_SERVER) is spawner._requests
    (process,) = psutil.Process().children()
    facts |= {{"spawner": process.cmdline(), "same": same, "made_before": made_before}}
print(json.dumps(facts | {{"runs": process.is_running(), "requests": spawner._requests}}))
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    facts = json.loads(run.stdout)
    assert facts["made_before"] == 0
    assert facts["text"]
    assert facts["command"][1:4] == ["-m", "slimqwen.vllm_plugin.api_server", "--model"]
    assert facts["leads_its_group"]
    assert facts["parent"] == facts["spawner"]
    assert "slimqwen.processes.spawner" in facts["parent"]
    assert facts["same"]
    assert not facts["runs"]
    assert facts["requests"] is None
    assert not psutil.pid_exists(facts["server"])
    log = (tmp_path / "log").read_text()
    assert re.search(r"patches of vLLM [\d.]+: .*\bforked_processes\b", log)  # as in a server of its own
    assert "Application startup complete" in log
