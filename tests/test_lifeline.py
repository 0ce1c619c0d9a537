"""However a command ends and whichever of its processes is killed, the others end too."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from slimqwen import lifeline
from tests.serving.real_server import ended, wait_for

ROLES = ("command", "warm worker", "spawner", "job", "server", "engine", "worker")
GROUP = "group"

Start = Callable[..., dict[str, psutil.Process]]


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary folder of all processes."""
    with tempfile.TemporaryDirectory(prefix="t.", dir="/tmp") as folder:  # short enough for sockets
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


@pytest.fixture
def start(tmp_path: Path, temporary: Path) -> Iterator[Start]:
    """Start a command that serves; its processes by role."""
    started: dict[str, psutil.Process] = {}

    def run(*words: str, kind: str = "forked") -> dict[str, psutil.Process]:
        folder = tmp_path / kind
        folder.mkdir()
        # A test run under nohup would hand on that it is ignored.
        before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
        command = subprocess.Popen(
            [sys.executable, "-m", "tests.light_command", folder, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        signal.signal(signal.SIGHUP, before)
        started["command"] = psutil.Process(command.pid)
        assert command.stdout is not None
        with command.stdout as lines:
            started["server"] = psutil.Process(int(lines.readline()))
        (started["warm worker"],) = started["command"].children()
        started["spawner"], started["job"] = sorted(
            started["warm worker"].children(), key=lambda process: process.pid
        )
        for parent, child in (("server", "engine"), ("engine", "worker")):
            wait_for(lambda parent=parent: started[parent].children() != [])
            (started[child],) = started[parent].children()
        return started

    yield run
    for process in started.values():
        with suppress(psutil.NoSuchProcess):
            process.kill()


def send(number: signal.Signals, victim: str, processes: dict[str, psutil.Process]) -> None:
    if victim == GROUP:
        os.killpg(processes["command"].pid, number)
    else:
        processes[victim].send_signal(number)


TABLE = [
    *((number, GROUP) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL)),
    *((signal.SIGTERM, victim) for victim in ("command", "spawner", "job", "server")),
    *((signal.SIGKILL, victim) for victim in ROLES),
]


@pytest.mark.parametrize(("number", "victim"), TABLE, ids=lambda value: getattr(value, "name", value))
def test_nothing_is_left_10_s_after_a_signal(
    start: Start, temporary: Path, number: signal.Signals, victim: str
) -> None:
    """Only a server that is killed itself leaves its folder of sockets."""
    processes = start()
    wait_for(lambda: any(temporary.glob("slimqwen.*")))
    assert processes["server"].parent() == processes["spawner"]
    assert os.getpgid(processes["server"].pid) == processes["server"].pid
    assert os.getsid(processes["server"].pid) == processes["command"].pid
    send(number, victim, processes)
    assert ended(list(processes.values()), 10), {
        role: process.status() for role, process in processes.items() if process.is_running()
    }
    is_killed = number == signal.SIGKILL and victim == "server"
    assert any(temporary.glob("slimqwen.*")) == is_killed


@pytest.mark.parametrize(
    ("number", "victim"), [(signal.SIGTERM, GROUP), (signal.SIGKILL, "job"), (signal.SIGKILL, "server")]
)
def test_nothing_is_left_of_a_server_that_is_no_fork(
    start: Start, number: signal.Signals, victim: str
) -> None:
    processes = start(kind="executed")
    assert processes["server"].parent() == processes["job"]
    send(number, victim, processes)
    assert ended(list(processes.values()), 10)


def test_a_server_that_ignores_sigterm_ends_all_the_same_with_its_folder_of_sockets(
    start: Start, temporary: Path
) -> None:
    """As vLLM does while it starts."""
    processes = start("stubborn")
    wait_for(lambda: any(temporary.glob("slimqwen.*")))
    send(signal.SIGKILL, "command", processes)
    assert ended(list(processes.values()), 10)
    assert not any(temporary.glob("slimqwen.*"))


def run_and_exit(body: str) -> "subprocess.CompletedProcess[str]":
    """Run lines as a command does that ends by `exit_after`; the module's own clean-up would print and wait."""
    program = (
        "import atexit, sys, threading, time\nfrom slimqwen import lifeline\n"
        "class Heavy:\n    def __del__(self): print('torn down')\n"
        "heavy = Heavy()\natexit.register(print, 'cleaned up')\n"
        f"def run():\n    print('ran')\n    {body}\nlifeline.exit_after(run)\n"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("return 7", 0, ""),
        ("sys.exit(143)", 143, ""),
        ("sys.exit('error: a cause')", 1, "error: a cause\n"),
        ("threading.Thread(target=time.sleep, args=(600,)).start()", 0, ""),
    ],
)
def test_a_command_ends_with_its_exit_code_and_without_the_clean_up_of_modules(
    body: str, code: int, said: str
) -> None:
    done = run_and_exit(body)
    assert (done.returncode, done.stdout, done.stderr) == (code, "ran\ncleaned up\n", said)


def test_an_exception_keeps_its_traceback_and_exit_code() -> None:
    assert "ValueError: odd" in run_and_exit("raise ValueError('odd')").stderr
    assert run_and_exit("raise KeyboardInterrupt").returncode == 130


def test_what_is_sent_on_a_lifeline_is_left_to_its_reader() -> None:
    read_end, write_end = os.pipe()
    ends: list[int] = []
    lifeline.watch(read_end, end=lambda: ends.append(1))
    os.write(write_end, b"job")
    assert os.read(read_end, 3) == b"job"
    assert not ends
    os.close(write_end)
    wait_for(lambda: ends == [1])
    os.close(read_end)
