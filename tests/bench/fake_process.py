"""A server in a process of its own, which may leak, lie or die."""

import subprocess
import sys
import textwrap
from contextlib import contextmanager

import httpx

from slimqwen.serving.server import free_port

_PROGRAM = """
import json, os, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
fault = sys.argv[2]
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    def log_message(self, *args): pass
    def do_POST(self): self.post(self.rfile.read(int(self.headers["Content-Length"])))
    def say(self, status, content, kind="application/json"):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
{answers}
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@contextmanager
def fake_process(answers, fault):
    """Its address and process id; `answers` is the source of its methods do_GET and post, which see `fault`."""
    port = free_port()
    program = _PROGRAM.format(answers=textwrap.indent(answers, "    "))
    process = subprocess.Popen([sys.executable, "-c", program, str(port), fault])
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(500):
            try:
                httpx.get(f"{url}/health", trust_env=False)
                break
            except httpx.ConnectError:
                assert process.poll() is None
        yield url, process.pid
    finally:
        process.kill()
        process.wait()
