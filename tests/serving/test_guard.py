import contextlib
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from slimqwen.serving import guard
from slimqwen.serving.errors import ServingError

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


def gone(process, timeout_s):
    """Whether it ends in time; a zombie that nobody collects has ended."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def test_a_server_that_ignores_sigterm_is_ended_by_force(start, monkeypatch):
    monkeypatch.setattr(guard, "STOP_TIMEOUT_S", 0.5)
    server = psutil.Process(start(STUBBORN).pid)
    guard.end(server)
    assert gone(server, 30)


def test_what_a_server_started_ends_with_it(start):
    server = psutil.Process(start(WITH_CHILD).pid)
    [child] = server.children()
    guard.end(server)
    assert gone(server, 30)
    assert gone(child, 30)


def test_the_shared_memory_of_what_is_ended_by_force_is_freed(start):
    name = f"slimqwen-test-{secrets.token_hex(8)}"
    server = psutil.Process(start(SHARES_MEMORY.format(name=name)).pid)
    family = server.children()
    assert len(family) == 2
    segment = Path("/dev/shm") / name
    assert segment.exists()
    guard.end(server)
    assert all(gone(one, 30) for one in family)
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
            guard.guarded(
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
    deadline = time.monotonic() + 60
    while not (text := (folder / "log").read_text()).endswith("\n"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return text


def test_a_server_lives_for_the_block_with_what_it_started(guarded, tmp_path):
    with guarded(WITH_CHILD) as server:
        printed(tmp_path)
        process = psutil.Process(server.pid)
        [child] = process.children()
        assert server.poll() is None
    assert not process.is_running()
    assert gone(child, 30)


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
        deadline = time.monotonic() + 60
        while server.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert (server.poll(), server.returncode) == (exit_code, exit_code)


@pytest.mark.parametrize("missing", ["command", "folder"])
def test_what_cannot_be_started_is_one_line(tmp_path, missing):
    argv = [str(tmp_path / "none")] if missing == "command" else [sys.executable, "-c", ""]
    folder = tmp_path / "none" if missing == "folder" else tmp_path

    def start():
        with (
            (tmp_path / "log").open("wb") as output,
            guard.guarded(argv, environment={}, folder=folder, output=output),
        ):
            pytest.fail("it started")

    with pytest.raises(ServingError, match=r"cannot start .*No such file.*make install") as refused:
        start()
    assert "\n" not in str(refused.value)


def test_what_a_server_that_was_killed_leaves_behind_is_ended(guarded, tmp_path):
    """As when memory runs out: an engine would keep its own, a GPU's too."""
    with guarded(WITH_CHILD) as server:
        printed(tmp_path)
        [child] = psutil.Process(server.pid).children()
        os.kill(server.pid, 9)
        assert gone(child, 10)
        deadline = time.monotonic() + 60
        while server.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert server.returncode == -9


def test_a_guard_that_was_killed_leaves_the_ending_to_the_starter(guarded, tmp_path):
    with guarded(WITH_CHILD) as server:
        printed(tmp_path)
        process = psutil.Process(server.pid)
        process.parent().kill()
        deadline = time.monotonic() + 60
        while server.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert process.is_running()
    assert gone(process, 30)


def keeper_process():
    command = [sys.executable, "-m", "slimqwen.serving.guard"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("said", ["", '{"argv": ["sleep", "6'])
def test_a_starter_that_dies_before_it_has_said_what_to_start_leaves_nothing(said):
    keeper = keeper_process()
    output, _ = keeper.communicate(said, timeout=20)
    assert (keeper.returncode, output) == (0, "")


STARTER = """
import os, sys
from pathlib import Path
from slimqwen.serving import guard

print("up", flush=True)
with (
    open(os.devnull, "wb") as output,
    guard.guarded(
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
    _, alive = psutil.wait_procs(family, timeout=20)
    assert [one for one in alive if one.status() != psutil.STATUS_ZOMBIE] == []
    time.sleep(0.2)
    assert running(token) == []
