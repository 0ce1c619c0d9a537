"""`slimqwen watch` in a pipe and on a terminal; servers are stand-ins that give a real server's text."""

import fcntl
import os
import pty
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from rich.console import Console

from slimqwen import variant
from slimqwen.cli.watch import activity, display
from slimqwen.serving import metrics
from slimqwen.serving.server import free_port
from slimqwen.vllm_plugin import api_server

COMMAND = [sys.executable, "-m", "slimqwen.cli", "watch"]
METRICS = Path(__file__).parents[2] / "serving" / "data" / "metrics.txt"
STAND_IN = """
import http.server, pathlib, sys, time

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(pathlib.Path("metrics.txt").read_bytes())

    def log_message(self, *_):
        pass

while not pathlib.Path("ready").exists():
    time.sleep(0.02)
http.server.HTTPServer(("127.0.0.2", int(sys.argv[-1])), Handler).serve_forever()
"""


def text_of(picture, width=80):
    console = Console(width=width, highlight=False)
    with console.capture() as captured:
        console.print(picture)
    return captured.get()


@pytest.fixture
def server(tmp_path):
    """What looks like a server of the repository tmp_path; it listens once there is a file `ready`."""
    package = tmp_path / "slimqwen/vllm_plugin"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "api_server.py").write_text(STAND_IN)
    shutil.copy(METRICS, tmp_path / "metrics.txt")
    words = [
        "-m",
        api_server.__name__,
        "--model",
        "weights/tiny",
        "--host",
        "127.0.0.2",
        "--port",
        str(free_port()),
    ]
    process = subprocess.Popen([sys.executable, *words], cwd=tmp_path)
    yield process
    process.kill()
    process.wait()


def test_a_server_is_shown_from_its_start_to_its_end(server, tmp_path):
    history = {}

    def draw_until(text):
        deadline = time.monotonic() + 300
        while text not in (shown := text_of(display.draw(tmp_path, history))):
            assert time.monotonic() < deadline, shown
            time.sleep(0.05)
        return shown

    draw_until("starting")
    (tmp_path / "ready").touch()
    assert "server of weights/tiny" in draw_until("acceptance length")
    (tmp_path / "metrics.txt").write_text("<html>")
    draw_until("no answer")
    server.kill()
    server.wait()
    draw_until("Nothing runs here")
    assert history == {}


def test_figures_are_rates_between_scrapes_and_medians_and_shares_of_the_last_minute():
    real = metrics.read(METRICS.read_text(encoding="utf-8"))
    first = display.figures([(100.0, real)])
    assert (first["median TTFT, ms"], first["acceptance length"]) == (
        "60.0",
        "4.34",
    )  # since the server's start
    assert (first["generated tokens/s"], first["prefix cache hits"]) == ("-", "-")
    later = real | {
        "vllm:generation_tokens_total": real["vllm:generation_tokens_total"] + 30,
        "vllm:spec_decode_num_drafts_total": real["vllm:spec_decode_num_drafts_total"] + 10,
        "vllm:spec_decode_num_accepted_tokens_total": real["vllm:spec_decode_num_accepted_tokens_total"] + 20,
    }
    second = display.figures([(100.0, real), (102.0, later)])
    assert (second["generated tokens/s"], second["acceptance length"]) == ("15", "3.00")


@pytest.fixture
def published():
    """This process as a command that evaluates."""
    root = variant.repository_root()
    with activity.publish(root, ["slimqwen", "eval", "quality", "--variant", "[tiny]"]) as report:
        report("generating answers of facts", 12, 150)
        deadline = time.monotonic() + 60
        while not any(work.pid == os.getpid() and work.activities for work in activity.running(root)):
            assert time.monotonic() < deadline
        yield


@pytest.mark.parametrize("arguments", [[], ["--once"]])
def test_in_a_pipe_it_shows_once_and_ends(published, arguments):
    ended = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=600)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "slimqwen eval quality --variant [tiny]" in ended.stdout  # no markup
    assert "12 of 150" in ended.stdout
    assert "\x1b" not in ended.stdout


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_and_leaves_the_terminal_as_it_was(number, code):
    controller, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 60, 80, 0, 0))
    process = subprocess.Popen(
        COMMAND, stdin=follower, stdout=follower, stderr=follower, env=os.environ | {"TERM": "xterm-256color"}
    )
    os.close(follower)
    output, deadline = b"", time.monotonic() + 300
    try:
        while output.count(b"Ctrl-C ends") < 2:
            assert time.monotonic() < deadline, output
            if select.select([controller], [], [], 0.1)[0]:
                output += os.read(controller, 65536)
        process.send_signal(number)
        assert process.wait(300) == code
        while select.select([controller], [], [], 0.1)[0]:
            output += os.read(controller, 65536)
    except OSError:  # the last reader of a terminal that is gone
        pass
    finally:
        process.kill()
        process.wait()
        os.close(controller)
    assert (
        output.count(b"\x1b[?1049h") == output.count(b"\x1b[?1049l") == 1
    )  # its own screen, entered and left
    assert output.rindex(b"\x1b[?25h") > output.rindex(b"\x1b[?25l")  # a cursor
