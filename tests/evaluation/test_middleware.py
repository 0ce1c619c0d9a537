"""The paired timing of the middleware, between two servers that stream; the real ones are started by hand."""

import contextlib
import dataclasses
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from slimqwen import variant
from slimqwen.evaluation import middleware
from slimqwen.evaluation.statistics import TooFewItemsError
from slimqwen.records import provenance, results, store
from slimqwen.report import plots


class Streams(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    tokens = 4

    def do_POST(self):
        self.server.asked.append(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(self.server.delay_s)
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        for _ in range(self.tokens):
            self.wfile.write(b'data: {"choices": []}\n\n')
            time.sleep(0.001)
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_):
        pass


@pytest.fixture
def servers(monkeypatch):
    """Stand-ins for the server with the middleware, which takes longer, and for the bare one."""
    started = []

    @contextlib.contextmanager
    def serving(command, *, log):
        server = ThreadingHTTPServer(("127.0.0.1", 0), Streams)
        bare = "--middleware" not in command.argv
        server.asked, server.delay_s = [], 0.02 if bare else 0.06
        started.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield SimpleNamespace(base_url=f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
        server.server_close()

    monkeypatch.setattr(middleware.launch, "serving", serving)
    return started


def test_both_servers_are_asked_the_same_in_turns_and_the_slower_one_is_seen(servers, tmp_path, monkeypatch):
    found = middleware.cost(variant.load("tiny"), 2, 5, tmp_path)
    assert [server.asked for server in servers[::2]] == [server.asked for server in servers[1::2]]
    assert [server.delay_s for server in servers] == [0.02, 0.06, 0.06, 0.02]
    assert [pair["round"] for pair in found["pairs"]] == [0] * 5 + [1] * 5
    ratio = found["ttft_ms_with_over_without"]
    assert 2 < ratio["low"] <= ratio["value"] <= ratio["high"] < 4

    monkeypatch.setattr(results.checkpoint, "digest", lambda folder: "ab" * 32)
    one = dataclasses.replace(variant.load("tiny"), root=tmp_path)
    file = results.write(
        "middleware", one, found, command=["bench_middleware.py"], started=provenance.utc_now()
    )
    assert store.parse(file)["pairs"] == found["pairs"]
    assert [panel.y for panel in plots.middleware(found)] == ["TTFT (ms)", "TPOT (ms)"]
    assert "TTFT (ms)" in plots.beside(file).read_text()


def test_a_server_that_streams_nothing_is_no_measurement(servers, tmp_path, monkeypatch):
    monkeypatch.setattr(Streams, "tokens", 0)
    with pytest.raises(middleware.NoStreamError, match="streamed 0 of 32 tokens"):
        middleware.cost(variant.load("tiny"), 2, 2, tmp_path)


@pytest.mark.parametrize(("rounds", "pairs"), [(1, 300), (2, 0)])
def test_what_shows_no_spread_is_refused_before_anything_starts(servers, tmp_path, rounds, pairs):
    with pytest.raises(TooFewItemsError, match="2 rounds or more"):
        middleware.cost(variant.load("tiny"), rounds, pairs, tmp_path)
    assert servers == []
