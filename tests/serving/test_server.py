import os
import re
import signal
import socket
import subprocess
import sys

import psutil
import pytest

from slimqwen import variant
from slimqwen.serving import checks, server
from slimqwen.serving.command import ServerCommand
from slimqwen.serving.errors import ServingError
from slimqwen.serving.server import ServerProcess, find_running, free_port, run_server, start_process
from slimqwen.vllm_plugin import api_server
from tests.serving import real_server


def test_a_server_that_dies_on_a_full_disk_names_the_disk(tmp_path, monkeypatch):
    """Its log lies there, too, and may end before vLLM's own words."""
    log = tmp_path / "vllm.log"
    log.write_text("FileNotFoundError: [Errno 2] No such file or directory: 'modelinfos'\n")
    assert server._failure(log).startswith("FileNotFoundError")
    monkeypatch.setattr(server, "is_full", lambda folder: folder == tmp_path)
    assert re.fullmatch(
        r"No space left on device \(FileNotFoundError: .*\); free some disk space", server._failure(log)
    )


def test_a_server_that_dies_at_start_is_an_error_that_quotes_its_log(servable, tmp_path, monkeypatch):
    command = servable()
    monkeypatch.setattr(checks, "check_command", lambda *_: None)
    (tmp_path / "weights/v/config.json").write_text("{}")
    log = tmp_path / "vllm.log"

    with (
        pytest.raises(
            ServingError, match=r"before it was ready: .*model_type.*; read more in its log: .*vllm\.log$"
        ),
        run_server(command, log=log, timeout_s=600),
    ):
        pytest.fail("it served")
    with (
        pytest.raises(ServingError, match=r"; read more in its log: that which stays$"),
        run_server(command, log=log, kept_log="that which stays", timeout_s=600),
    ):
        pytest.fail("it served")


@pytest.mark.parametrize("missing", ["command", "folder"])
def test_what_cannot_be_started_is_one_line(tmp_path, missing):
    argv = [str(tmp_path / "none")] if missing == "command" else [sys.executable, "-c", ""]
    folder = tmp_path / "none" if missing == "folder" else tmp_path
    with (
        (tmp_path / "log").open("wb") as output,
        pytest.raises(ServingError, match=r"cannot start .*No such file.*make install"),
        start_process(argv, environment={}, folder=folder, output=output),
    ):
        pytest.fail("it started")


def test_a_process_gets_its_folder_and_environment_and_no_input_and_its_end_is_seen(tmp_path):
    code = (
        "import os, sys; print(os.getcwd(), sorted(k for k in os.environ if k in ('SECRET', 'HOME')), "
        "os.getpgid(0) == os.getpid(), os.getsid(0), sys.stdin.read() == '', file=sys.stderr)"
    )
    argv = [sys.executable, "-c", code]
    log = tmp_path / "log"
    with (
        log.open("wb") as output,
        start_process(argv, environment={"SECRET": "sesame"}, folder=tmp_path, output=output) as process,
    ):
        real_server.wait_for(lambda: process.has_ended)
    assert log.read_text() == f"{tmp_path} ['SECRET'] True {os.getsid(0)} True\n"


def test_a_server_that_ends_just_before_it_would_be_killed_is_no_error(monkeypatch):
    ours, theirs = socket.socketpair()
    started = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

    def wait_in_vain(*_):
        started.kill()
        started.wait()
        return [], [], []

    monkeypatch.setattr(server.select, "select", wait_in_vain)
    with ours, theirs, started.stdin:
        ServerProcess(started.pid, ours).end()
    assert started.returncode == -signal.SIGKILL


@pytest.mark.engine
def test_the_engine_and_its_worker_are_forked_and_the_worker_has_its_threads_on_its_cpus(tiny_server):
    """A worker that was started anew would have its OpenMP variables in its own environment."""
    family = psutil.Process(tiny_server.pid).children(recursive=True)
    (worker,) = (process for process in family if process.name() == "VLLM::Worker")
    assert "GOMP_CPU_AFFINITY" not in worker.environ()
    (cpus,) = re.findall(r"local_rank=0, core ids=\[([\d, ]+)\]", tiny_server.log.read_text())
    assert worker.cpu_affinity() == [int(cpu) for cpu in cpus.split(",")]


@pytest.fixture(scope="module")
def served_by_script(tmp_path_factory):
    """The process that scripts/serve.py was, and its port."""
    port = free_port()
    script = variant.repository_root() / "scripts/serve.py"
    log = tmp_path_factory.mktemp("script") / "vllm.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, script, "--variant", "tiny", "--port", str(port)],
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        real_server.wait_until_ready(f"http://127.0.0.1:{port}", process, log)
        yield process, port
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.engine
def test_a_running_server_is_found_by_its_exact_command_only(served_by_script):
    process, port = served_by_script
    result = find_running(ServerCommand.resolve(variant.load("tiny"), port=port, platform="cpu"))
    assert result is not None
    assert result.pid == process.pid

    other = ServerCommand.resolve(variant.load("tiny-mtp4"), port=port, platform="cpu")
    assert find_running(other) is None
    nobody = ServerCommand.resolve(variant.load("tiny"), port=free_port(), platform="cpu")
    assert find_running(nobody) is None


@pytest.mark.engine
def test_serve_becomes_vllm_and_ctrl_c_ends_it(served_by_script):
    """SIGTERM ends one with its children in test_failures.py."""
    process, _ = served_by_script
    family = psutil.Process(process.pid).children(recursive=True)
    assert api_server.__name__ in " ".join(psutil.Process(process.pid).cmdline())
    process.send_signal(signal.SIGINT)
    process.wait(timeout=30)
    # An ended process stays listed as a zombie until whoever adopted it collects its exit code.
    assert real_server.ended(family, 10)
