"""First requests against the next ones, on stand-ins that keep the clock; the real servers are started by hand."""

import contextlib
import dataclasses
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from slimqwen import checkpoint, variant
from slimqwen.evaluation import first_request
from slimqwen.evaluation.statistics import Ratio, TooFewItemsError
from slimqwen.records import provenance, results, store
from slimqwen.report import plots, tables
from slimqwen.serving import chat_template

PREFIX = "Chat prefix with thinking on:"
WARM = f"{PREFIX} 1030 tokens, of which the next chat found 1024 in the prefix cache (blocks of 128)"
SHORT = f"{PREFIX} 1030 tokens, computed in each request: the prefix cache holds whole blocks of 2048 tokens"
OFF = f"{PREFIX} 3 tokens, computed in each request: prefix caching is off"


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self._send(f"vllm:prefix_cache_hits_total {self.server.hits}.0\n".encode())

    def do_POST(self):
        stand_in = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        path = self.path.rpartition("/")[2]
        stand_in.asked.append((path, body))
        cold = "chat_template_kwargs" in body
        stand_in.hits += (
            stand_in.world["cold_hits" if cold else "warm_hits"] if stand_in.name == "rules" else 0
        )
        first = len(stand_in.asked) == 1
        stand_in.world["now_s"] += 0.08 if cold or (first and stand_in.name == "bare") else 0.01
        usage = {"prompt_tokens": 70, "completion_tokens": stand_in.world["tokens"]}
        self._send(
            b'data: {"choices": [1]}\n\ndata: '
            + json.dumps({"usage": usage}).encode()
            + b"\n\ndata: [DONE]\n"
        )

    def _send(self, content):
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def stand_ins(**changed):
    """What the stand-ins do, and those that were started, in order."""
    world = {
        "now_s": 0.0,
        "tokens": first_request.ANSWER_TOKENS,
        "warm_hits": 1024,
        "cold_hits": 0,
        "log": WARM,
    }
    world |= {"started": [], **changed}

    @contextlib.contextmanager
    def serving(command, *, log, progress):
        server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        server.name = "rules" if command.flags["enable-prefix-caching"] else "warmed"
        if "--middleware" not in command.argv:
            server.name = "bare"
        if server.name == "rules":
            chat_template.check(Path(command.flags["chat-template"]), command.variant.weights, {})
            assert "speculative-config" not in command.flags
        log.write_text(world["log"] if server.name == "rules" else OFF)
        server.world, server.asked, server.hits = world, [], 0
        world["started"].append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield SimpleNamespace(base_url=f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
        server.server_close()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(first_request.launch, "serving", serving)
        patched.setattr(first_request, "time", SimpleNamespace(perf_counter=lambda: world["now_s"]))
        yield world


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two rounds of a variant that drafts: the figures, and the stand-ins in order."""
    with stand_ins() as world:
        found = first_request.measure(variant.load("tiny-mtp4"), 2, tmp_path_factory.mktemp("logs"))
    return SimpleNamespace(found=found, servers=world["started"])


def test_a_cold_first_request_is_seen_and_a_warm_one_passes(run):
    found = run.found
    assert found["verdicts"] == {"chat": "pass", "completion": "pass"}
    ratios = found["first_over_steady"]
    assert {kind: one["value"] for kind, one in ratios["warmed"].items()} == {"chat": 1.0, "completion": 1.0}
    # Of two starts, each kind was the very first once, and eight times as slow.
    for one in ratios["bare"].values():
        assert one["value"] == pytest.approx(8**0.5)
        assert one["low"] < 1 < 8 < one["high"]


def test_both_servers_are_asked_the_same_and_nothing_twice(run):
    names = [server.name for server in run.servers]
    assert names == ["warmed", "bare", "rules", "bare", "warmed", "rules"]
    asked = [server.asked for server in run.servers]
    assert (asked[0], asked[3]) == (asked[1], asked[4])
    assert [path for path, _ in asked[0][:2]] == ["completions", "completions"]
    assert ["messages" in body for _, body in asked[0][:2]] == [True, False]
    assert ["messages" in body for _, body in asked[3][:2]] == [False, True]
    said = [
        json.dumps(body.get("messages", body.get("prompt"))) for one in (0, 2, 3, 5) for _, body in asked[one]
    ]
    assert len(said) == len(set(said)) == 2 * (2 * 21 + 21)


def test_the_first_length_is_in_the_middle_and_no_length_comes_twice(run):
    """A length that has been there is faster, which has nothing to do with being first."""
    prompts = [body["prompt"] for _, body in run.servers[0].asked if "prompt" in body]
    middle = first_request.QUESTION_TOKENS["completion"]
    lengths = [len(prompt) for prompt in prompts]
    assert lengths[:4] == [middle, middle + 1, middle - 1, middle + 2]
    assert len(set(lengths)) == 1 + first_request.STEADY_REQUESTS
    chats = first_request.QUESTION_TOKENS["chat"] - first_request.STEADY_REQUESTS // 2
    assert max(lengths) < chats


def test_the_record_is_kept_with_its_plot_and_its_table(run, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "digest", lambda folder: "ab" * 32)
    one = dataclasses.replace(variant.load("tiny-mtp4"), root=tmp_path)
    found = run.found
    file = results.write("first_request", one, found, command=["b.py"], started=provenance.utc_now())
    assert store.read(file)["rules"] == found["rules"]
    assert "first TTFT / median of the next" in plots.beside(file).read_text()
    table = tables.first_request_table(tmp_path, "tiny-mtp4")
    shown = {row[0]: row[1:] for row in table.rows}
    assert shown["first chat, warmed"] == ("10.0", "10.0", "1.00", "1.00 to 1.00", "pass")
    assert shown["first chat, bare"][:3] == ("45.0", "10.0", "2.83")
    assert shown["chats, rules never seen"] == ("80.0", "10.0", "8.00", "8.00 to 8.00", "")
    notes = "\n".join(table.notes)
    assert "found 1024 of them in the cache (blocks of 128)" in notes
    assert OFF in notes


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"log": SHORT}, "no chat prefix is warm here.*whole blocks of 2048 tokens"),
        ({"warm_hits": 896}, "found 896 tokens in the prefix cache where the warm-up had left 1024"),
        ({"cold_hits": 128}, "never been there found tokens in the prefix cache"),
        ({"tokens": 3}, "and not 16 tokens"),
    ],
)
def test_what_is_not_what_it_is_measured_for_is_no_measurement(tmp_path, changed, reason):
    with stand_ins(**changed), pytest.raises(first_request.FirstRequestError, match=reason):
        first_request.measure(variant.load("tiny"), 2, tmp_path)


def test_one_round_is_refused_before_anything_starts(tmp_path):
    with stand_ins() as world, pytest.raises(TooFewItemsError, match="2 or more"):
        first_request.measure(variant.load("tiny"), 1, tmp_path)
    assert world["started"] == []


@pytest.mark.parametrize(
    ("low", "high", "verdict"), [(0.9, 1.2, "pass"), (1.21, 1.5, "fail"), (1.0, 1.3, "inconclusive")]
)
def test_a_verdict_needs_the_whole_interval(low, high, verdict):
    assert first_request.judge(Ratio(1.1, low, high)) == verdict
