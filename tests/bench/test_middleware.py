"""The paired timing of the middleware, between two servers that stream; the real ones are started by hand."""

import contextlib
import dataclasses
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from slimqwen import variant
from slimqwen.bench import BenchError, middleware
from slimqwen.bench.start_up import StartUp
from slimqwen.records import provenance, store
from slimqwen.stats.intervals import TooFewItemsError


class Streams(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    tokens = middleware.ANSWER_TOKENS

    def do_GET(self):
        self._begin()

    def do_POST(self):
        self.server.asked.append(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(self.server.delay_s)
        self._begin()
        for _ in range(self.tokens):
            self.wfile.write(b'data: {"choices": [{"text": "x"}]}\n\n')
            time.sleep(0.001)
        self.wfile.write(b'data: {"usage": {"completion_tokens": %d, "prompt_tokens": 9}}\n\n' % self.tokens)
        self.wfile.write(b"data: [DONE]\n\n")

    def _begin(self):
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def servers(monkeypatch):
    """Stand-ins for the server with the middleware, which takes longer, and for the bare one."""
    started = []

    @contextlib.contextmanager
    def run_server(command, *, log):
        server = ThreadingHTTPServer(("127.0.0.1", 0), Streams)
        bare = "--middleware" not in command.argv
        server.asked, server.delay_s = [], 0.1 if bare else 0.3
        started.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield SimpleNamespace(base_url=f"http://127.0.0.1:{server.server_port}", model="m", log=log)
        server.shutdown()
        server.server_close()

    committed = store.read(store.latest_result(variant.repository_root(), StartUp, "tiny-best"), StartUp)
    monkeypatch.setattr(middleware, "run_server", run_server)
    monkeypatch.setattr(provenance, "of_served_variant", lambda *_, **__: committed.provenance)
    return started


@pytest.fixture
def measure(servers, tmp_path):
    """Write a record of the variant tiny below tmp_path."""
    (tmp_path / "weights").symlink_to(variant.repository_root() / "weights")
    tiny = dataclasses.replace(variant.load("tiny"), root=tmp_path)
    return lambda rounds, pairs: middleware.write(tiny, rounds, pairs, command=["x"])


def test_both_servers_are_asked_the_same_in_turns_and_the_slower_one_is_seen(servers, measure):
    path = measure(2, 5)
    record = store.read(path, middleware.Middleware)
    assert [server.asked for server in servers[::2]] == [server.asked for server in servers[1::2]]
    assert [server.delay_s for server in servers] == [0.1, 0.3, 0.3, 0.1]
    assert [pair.round for pair in record.pairs] == [0] * 5 + [1] * 5
    ratio = record.ttft_ms_with_over_without
    assert 2 < ratio.low <= ratio.value <= ratio.high < 4
    assert [row[0] for row in record.tables(path)[0].rows] == ["TTFT", "TPOT"]


@pytest.mark.parametrize(("tokens", "said"), [(0, "did not answer"), (3, "answered 3 of 32 tokens")])
def test_an_answer_that_is_empty_or_too_short_is_no_measurement(measure, monkeypatch, tokens, said):
    monkeypatch.setattr(Streams, "tokens", tokens)
    with pytest.raises(BenchError, match=said):
        measure(2, 2)


@pytest.mark.parametrize(("rounds", "pairs"), [(1, 300), (2, 0)])
def test_what_shows_no_spread_is_refused_before_anything_starts(servers, measure, rounds, pairs):
    with pytest.raises(TooFewItemsError, match="2 rounds or more"):
        measure(rounds, pairs)
    assert servers == []
