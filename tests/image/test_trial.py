"""A trial start of an image's server: it is asked once it is ready, and ended."""

import json
import signal
import subprocess
import sys
from pathlib import Path

from slimqwen.image import trial
from tests.serving.real_server import free_port

SERVER = """
import http.server, json, sys, time

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if time.time() > BEGAN + 0.6 else 503)
        self.end_headers()
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = {"choices": [{"message": {"content": asked["messages"][0]["content"].upper()}}]}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

BEGAN = time.time()
print("a line of its log", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_trial_asks_a_server_once_it_is_ready_and_ends_it(tmp_path, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    port = str(free_port())
    words = [sys.executable, str(Path(trial.__file__)), port, sys.executable, "-c", SERVER, port]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    seen = json.loads(done.stdout)
    assert seen["answers_of_ping"][-2:] == [503, 200]
    assert seen["message"] == {"content": "HELLO! WHO ARE YOU?"}
    assert seen["exit_code"] == -signal.SIGTERM
    assert done.stderr.startswith("a line of its log\n")


def test_a_trial_of_a_server_that_ends_says_so(tmp_path):
    words = [sys.executable, str(Path(trial.__file__)), str(free_port()), sys.executable, "-c", "exit(3)"]
    seen = json.loads(subprocess.run(words, capture_output=True, text=True, timeout=60).stdout)
    assert (seen["answers_of_ping"], seen["exit_code"]) == ([0], 3)
