"""Servers that are forks of a process that has imported vLLM: they answer, and end with whoever started them."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from slimqwen import variant
from slimqwen.progress import Progress
from slimqwen.recipe import warm_worker
from slimqwen.recipe.warm_worker import WarmWorker
from slimqwen.serving import platform, spawner
from slimqwen.serving.command import ServerCommand
from slimqwen.serving.server import free_port, run_server

API_SERVER = ("python", "-m", "slimqwen.vllm_plugin.api_server", "--model", "x")


def test_a_server_with_a_variable_that_an_import_may_read_has_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(spawner.SOCKET, "/socket")
    command = ServerCommand.resolve(variant.load("tiny"), platform="cpu")
    assert spawner.socket_for(command.argv, command.process_environment()) == "/socket"
    assert spawner.socket_for(API_SERVER, {"VLLM_USE_MODELSCOPE": "1"}) is None
    assert spawner.socket_for(("python", "-c", "pass"), {}) is None
    monkeypatch.delenv(spawner.SOCKET)
    assert spawner.socket_for(API_SERVER, {}) is None


def ask(log: Path, _: Path, seconds: float, progress: Progress) -> dict[str, Any]:
    """Start the embedded model, ask it for two tokens, and stay for a while."""
    command = ServerCommand.resolve(variant.load("tiny"), port=free_port(), platform="cpu")
    with run_server(command, log=log) as server:
        progress(str(server.pid), 1, 1)
        body = {"model": server.model, "prompt": "a", "max_tokens": 2, "temperature": 0}
        answer = httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=60, trust_env=False)
        process = psutil.Process(server.pid)
        facts = {
            "text": answer.json()["choices"][0]["text"],
            "server": server.pid,
            "command": process.cmdline(),
            "leads_its_group": os.getpgid(server.pid) == server.pid,
        }
        time.sleep(seconds)
    return facts


@pytest.fixture
def warm(tmp_path: Path) -> Iterator[WarmWorker]:
    environment = os.environ | platform.preloaded_libraries(os.environ)
    with (
        (tmp_path / "log").open("wb") as output,
        warm_worker.started(environment, output, str(tmp_path / "socket")) as worker,
    ):
        yield worker


def receive(worker: WarmWorker, kind: str) -> tuple[Any, ...]:
    """The content of the next message of a kind."""
    while (message := worker.messages.recv())[0] != kind:
        assert message[0] not in ("failed", "refused"), message
    return tuple(message[1:])


@pytest.mark.engine
def test_servers_are_forks_of_one_import_and_end_with_their_job(warm: WarmWorker, tmp_path: Path) -> None:
    environment = os.environ | {spawner.SOCKET: str(tmp_path / "socket")}
    warm.give(environment, ask, tmp_path / "1.log", tmp_path, 0)
    facts = receive(warm, "done")[0]
    receive(warm, "ended")
    assert "slimqwen.recipe.warm_worker" in facts["command"]
    assert facts["leads_its_group"]
    assert facts["text"]
    assert not psutil.pid_exists(facts["server"])
    log = (tmp_path / "1.log").read_text()
    assert "Engine fix forked_processes is active" in log  # as in a server of its own
    assert "Application startup complete" in log

    job = psutil.Process(warm.give(environment, ask, tmp_path / "2.log", tmp_path, 600))
    activity, *_ = receive(warm, "progress")
    server = psutil.Process(int(activity))
    processes = [server, *server.children(recursive=True)]
    job.kill()
    receive(warm, "ended")
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not alive
