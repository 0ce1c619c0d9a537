import subprocess
import sys
import time

import psutil
import pytest

from slimqwen.serving import guard

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
WITH_CHILD = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("up", flush=True)
time.sleep(60)
"""


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
    assert gone(server, 1)


def test_what_a_server_started_ends_with_it(start):
    server = psutil.Process(start(WITH_CHILD).pid)
    [child] = server.children()
    guard.end(server)
    assert gone(server, 1)
    assert gone(child, 1)


def test_ending_a_server_that_has_ended_is_no_error(start):
    process = start(WITH_CHILD)
    server = psutil.Process(process.pid)
    guard.end(server)
    process.wait()
    guard.end(server)


def guard_process():
    command = [sys.executable, "-m", "slimqwen.serving.guard"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, text=True)


def test_a_pipe_that_closes_without_a_word_ends_the_server(start):
    server = start(WITH_CHILD)
    keeper = guard_process()
    keeper.stdin.write(f"{server.pid}\n")
    keeper.stdin.flush()
    time.sleep(0.5)
    assert server.poll() is None
    keeper.stdin.close()
    # Collected here first: until then it is a zombie, which the guard would wait for.
    assert server.wait(10) != 0
    assert keeper.wait(20) == 0


def test_a_released_server_is_left_alone(start):
    server = start(WITH_CHILD)
    keeper = guard_process()
    keeper.communicate(f"{server.pid}\nreleased\n", timeout=20)
    assert server.poll() is None


def test_a_starter_that_dies_before_it_started_a_server_leaves_nothing():
    keeper = guard_process()
    keeper.communicate("", timeout=20)
    assert keeper.returncode == 0
