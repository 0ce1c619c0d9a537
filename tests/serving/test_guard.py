import contextlib
import os
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from slimqwen.serving import guard
from slimqwen.serving.errors import ServingError
from slimqwen.serving.server import guarded as guarded_server
from tests.serving.real_server import ended, wait_for

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
WITH_CHILD = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("up", flush=True)
time.sleep(60)
"""

SHARES_MEMORY = """
import multiprocessing, signal, time
from multiprocessing.shared_memory import SharedMemory

def hold():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("up", flush=True)
    time.sleep(60)

memory = SharedMemory("{name}", create=True, size=64)
multiprocessing.get_context("fork").Process(target=hold).start()
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    """What a server leaves is ended by force soon."""
    monkeypatch.setattr(guard, "_GRACE_S", 0.3)


@pytest.fixture
def start():
    """Start Python code that prints a line when it is up; ended with the test."""
    started = []

    def run(code):
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout.readline() == b"up\n"
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_server_that_ignores_sigterm_is_ended_by_force(start, monkeypatch):
    monkeypatch.setattr(guard, "STOP_TIMEOUT_S", 0.5)
    server = psutil.Process(start(STUBBORN).pid)
    guard.end(server)
    assert ended([server], 30)


def test_what_a_server_started_ends_with_it(start):
    server = psutil.Process(start(WITH_CHILD).pid)
    [child] = server.children()
    guard.end(server)
    assert ended([server], 30)
    assert ended([child], 30)


def test_the_shared_memory_of_what_is_ended_by_force_is_freed(start):
    name = f"slimqwen-test-{secrets.token_hex(8)}"
    server = psutil.Process(start(SHARES_MEMORY.format(name=name)).pid)
    family = server.children()
    assert len(family) == 2
    segment = Path("/dev/shm") / name
    assert segment.exists()
    guard.end(server)
    assert ended(family, 30)
    assert not segment.exists()


def test_ending_a_server_that_has_ended_is_no_error(start):
    process = start(WITH_CHILD)
    server = psutil.Process(process.pid)
    guard.end(server)
    process.wait()
    guard.end(server)


def running(token):
    """The processes with a word on their command line, those that have ended left out."""
    result = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if token in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                result.append(process)
    return result


@pytest.fixture
def guarded(tmp_path):
    """A guarded server that runs Python code; what it prints goes to tmp_path/log."""

    @contextlib.contextmanager
    def start(code, *words, environment=None):
        with (
            (tmp_path / "log").open("wb") as output,
            guarded_server(
                [sys.executable, "-c", code, *words],
                environment=os.environ if environment is None else environment,
                folder=tmp_path,
                output=output,
            ) as server,
        ):
            yield server

    return start


def printed(folder):
    """What the server has printed, once it has printed a line."""
    wait_for(lambda: (folder / "log").read_text().endswith("\n"))
    return (folder / "log").read_text()


def test_a_server_lives_for_the_block_with_what_it_started(guarded, tmp_path):
    with guarded(WITH_CHILD) as server:
        printed(tmp_path)
        process = psutil.Process(server.pid)
        [child] = process.children()
        assert server.poll() is None
    assert not process.is_running()
    assert ended([child], 30)


def test_a_server_gets_its_folder_its_environment_a_process_group_of_its_own_and_no_input(guarded, tmp_path):
    code = (
        "import os, sys; print(os.getcwd(), sorted(k for k in os.environ if k[0] == 'S'), "
        "os.getpgid(0) == os.getpid(), os.getsid(0), sys.stdin.read() == '', file=sys.stderr)"
    )
    with guarded(code, environment={"SECRET": "sesame", "SIZE": "3"}) as server:
        said = printed(tmp_path)
    assert said == f"{tmp_path} ['SECRET', 'SIZE'] True {os.getsid(0)} True\n"
    assert server.pid != os.getpid()


def test_the_environment_is_on_no_command_line(guarded):
    with guarded("import time; time.sleep(60)", environment={"KEY": "sesame"}) as server:
        [keeper] = [psutil.Process(server.pid).parent()]
        assert "slimqwen.serving.guard" in keeper.cmdline()
        assert "sesame" not in " ".join(keeper.cmdline() + psutil.Process(server.pid).cmdline())


@pytest.mark.parametrize(
    ("code", "exit_code"), [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", -9), ("", 0)]
)
def test_a_server_that_ends_by_itself_is_told_with_its_exit_code(guarded, code, exit_code):
    with guarded(code) as server:
        wait_for(lambda: server.poll() is not None)
        assert (server.poll(), server.returncode) == (exit_code, exit_code)


@pytest.mark.parametrize("missing", ["command", "folder"])
def test_what_cannot_be_started_is_one_line(tmp_path, missing):
    argv = [str(tmp_path / "none")] if missing == "command" else [sys.executable, "-c", ""]
    folder = tmp_path / "none" if missing == "folder" else tmp_path

    def start():
        with (
            (tmp_path / "log").open("wb") as output,
            guarded_server(argv, environment={}, folder=folder, output=output),
        ):
            pytest.fail("it started")

    with pytest.raises(ServingError, match=r"cannot start .*No such file.*make install"):
        start()


def test_what_a_server_that_was_killed_leaves_behind_is_ended(guarded, tmp_path):
    """As when memory runs out: an engine would keep its own, a GPU's too."""
    with guarded(WITH_CHILD) as server:
        printed(tmp_path)
        [child] = psutil.Process(server.pid).children()
        os.kill(server.pid, 9)
        assert ended([child], 10)
        wait_for(lambda: server.poll() is not None)
        assert server.returncode == -9


def test_a_guard_that_was_killed_leaves_the_ending_to_the_starter(guarded, tmp_path):
    with guarded(WITH_CHILD) as server:
        printed(tmp_path)
        process = psutil.Process(server.pid)
        process.parent().kill()
        wait_for(lambda: server.poll() is not None)
        assert process.is_running()
    assert ended([process], 30)


@pytest.mark.parametrize("said", [b"", b'{"argv": ["sleep", "6'])
def test_a_starter_that_dies_before_it_has_said_what_to_start_leaves_nothing(said):
    starter, other_end = socket.socketpair()
    keeper = subprocess.Popen([sys.executable, "-m", "slimqwen.serving.guard"], stdin=other_end)
    other_end.close()
    with starter:
        starter.sendall(said)
        starter.shutdown(socket.SHUT_WR)
        assert starter.recv(1) == b""
    assert keeper.wait(20) == 0


STARTER = """
import os, sys
from pathlib import Path
from slimqwen.serving import server

print("up", flush=True)
with (
    open(os.devnull, "wb") as output,
    server.guarded(
        [sys.executable, "-c", "import time; time.sleep(60)", sys.argv[1]],
        environment=os.environ, folder=Path.cwd(), output=output,
    ),
):
    sys.stdin.read()
"""


@pytest.mark.parametrize("after_s", [0.0, 0.002, 0.01, 0.05, 0.15, 0.3, 0.45, 0.6, 1.0])
def test_a_starter_that_is_killed_at_whatever_instant_leaves_no_server(after_s):
    token = secrets.token_hex(8)
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, token], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert starter.stdout.readline() == b"up\n"
    time.sleep(after_s)
    family = psutil.Process(starter.pid).children(recursive=True)
    starter.kill()
    starter.communicate()
    # The guard ends last: then nothing can follow.
    assert ended(family, 20)
    time.sleep(0.2)
    assert running(token) == []
