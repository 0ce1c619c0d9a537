"""`scripts/watch.py` as a person meets it, on a terminal and in a pipe; whatever else runs here is shown as well."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest

from slimqwen import running, variant

SCRIPT = [sys.executable, str(variant.repository_root() / "scripts" / "watch.py")]
ENTERED, LEFT, HIDDEN, SHOWN = b"\x1b[?1049h", b"\x1b[?1049l", b"\x1b[?25l", b"\x1b[?25h"


@pytest.fixture
def published():
    """This process as one that evaluates."""
    command = ["scripts/eval_quality.py", "--variant", "tiny"]
    with running.publishing(variant.repository_root(), command) as tell:
        tell("generating answers of facts", 12, 150)
        deadline = time.monotonic() + 10
        while not any(
            one.pid == os.getpid() and one.activities for one in running.find(variant.repository_root())
        ):
            assert time.monotonic() < deadline

        yield


@pytest.mark.parametrize("arguments", [[], ["--once"]])
def test_in_a_pipe_it_shows_once_and_ends(published, arguments):
    ended = subprocess.run([*SCRIPT, *arguments], capture_output=True, text=True, timeout=60)

    assert (ended.returncode, ended.stderr) == (0, "")
    assert "eval_quality --variant tiny" in ended.stdout
    assert re.search(r"generating answers of facts .*12 of 150", ended.stdout)
    assert "\x1b" not in ended.stdout


WORKER = """
import sys
sys.path.insert(0, "scripts")
from _console import progress_bar

with progress_bar() as progress:
    progress("counting", 1, 2)
    sys.stdin.read()
"""


def test_what_a_script_s_progress_bar_is_told_is_published_while_it_lasts():
    root = variant.repository_root()
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER], cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def told():
        return [
            (activity.name, activity.done, activity.total)
            for one in running.find(root)
            if one.pid == process.pid
            for activity in one.activities
        ]

    deadline = time.monotonic() + 30
    while not (found := told()):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    printed, _ = process.communicate()

    assert found == [("counting", 1, 2)]
    assert printed == "counting …\n"
    assert not (root / "logs" / "running" / f"{process.pid}.json").exists()


class Terminal:
    """The script on a terminal of 80 columns and 60 lines: room for what others run."""

    def __init__(self, *arguments):
        self.controller, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 60, 80, 0, 0))
        self.before = termios.tcgetattr(follower)
        self.process = subprocess.Popen(
            [*SCRIPT, *arguments],
            stdin=follower,
            stdout=follower,
            stderr=follower,
            env=os.environ | {"TERM": "xterm-256color"},
            start_new_session=True,
        )
        self.follower, self.output = follower, b""

    def read_until(self, found):
        """Read what it prints until that satisfies a condition."""
        deadline = time.monotonic() + 60
        while not found(self.output):
            assert time.monotonic() < deadline, self.output
            if select.select([self.controller], [], [], 0.1)[0]:
                self.output += os.read(self.controller, 65536)

    def ended(self):
        """Its exit code; what it still printed is read."""
        self.read_until(lambda _: self.process.poll() is not None)
        while select.select([self.controller], [], [], 0.1)[0]:
            self.output += os.read(self.controller, 65536)
        return self.process.returncode

    def is_clean(self):
        """Whether the terminal is as it was: its own screen, a cursor, its modes."""
        return (
            self.output.count(ENTERED) == self.output.count(LEFT) == 1
            and self.output.rindex(SHOWN) > self.output.rindex(HIDDEN)
            and termios.tcgetattr(self.follower) == self.before
        )


@pytest.fixture
def terminal():
    opened = Terminal()
    yield opened
    opened.process.kill()
    opened.process.wait()
    os.close(opened.controller)
    os.close(opened.follower)


@pytest.mark.parametrize("key", [b"q", b"Q", b"xyq", b"\x03"])
def test_a_key_ends_it_with_exit_0_and_a_clean_terminal(terminal, published, key):
    terminal.read_until(lambda output: output.count(b"q ends") >= 2)  # it goes on until then
    os.write(terminal.controller, key)

    assert terminal.ended() == 0
    assert terminal.is_clean()
    assert b"12 of 150" in terminal.output


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_with_a_clean_terminal(terminal, number, code):
    terminal.read_until(lambda output: b"q ends" in output)
    terminal.process.send_signal(number)

    assert terminal.ended() == code
    assert terminal.is_clean()


def test_another_key_does_not_end_it(terminal):
    terminal.read_until(lambda output: b"q ends" in output)
    os.write(terminal.controller, b"x\n\x1b[A")
    shown = terminal.output.count(b"q ends")
    terminal.read_until(lambda output: output.count(b"q ends") >= shown + 2)
    assert terminal.process.poll() is None
