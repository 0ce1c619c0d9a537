"""First requests against later ones, on stand-ins that keep the clock; the real servers are started by hand."""

import contextlib
import dataclasses
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.benchmarks.lib import endpoint_request_func

from slimqwen import variant
from slimqwen.bench import BenchError, first_request
from slimqwen.bench.first_request import FirstRequest
from slimqwen.bench.questions import QUESTION_TOKENS
from slimqwen.bench.start_up import StartUp
from slimqwen.records import provenance, store
from slimqwen.serving import chat_template
from slimqwen.stats.intervals import TooFewItemsError

COMMITTED = store.read(store.latest_result(variant.repository_root(), StartUp, "tiny-best"), StartUp)
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
            stand_in.world["cold_hits" if cold else "warm_hits"] if stand_in.name == "prompted" else 0
        )
        first = len(stand_in.asked) == 1
        stand_in.world["now_s"] += 0.08 if cold or (first and stand_in.name == "bare") else 0.01
        usage = {"prompt_tokens": 70, "completion_tokens": stand_in.world["tokens"]}
        self._send(
            b'data: {"choices": [{"text": "x", "delta": {}}]}\n\ndata: '
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
    def run_server(command, *, log, progress):
        server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        server.name = "prompted" if command.flags["enable-prefix-caching"] else "warmed"
        if "--middleware" not in command.argv:
            server.name = "bare"
        if server.name == "prompted":
            chat_template.check(Path(command.flags["chat-template"]), command.variant.weights, {})
            assert "speculative-config" not in command.flags
        log.parent.mkdir(exist_ok=True)
        log.write_text(world["log"] if server.name == "prompted" else OFF)
        server.world, server.asked, server.hits = world, [], 0
        world["started"].append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield SimpleNamespace(base_url=f"http://127.0.0.1:{server.server_port}", model="m", log=log)
        server.shutdown()
        server.server_close()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(first_request, "run_server", run_server)
        patched.setattr(provenance, "of_served_variant", lambda *_, **__: COMMITTED.provenance)
        clock = SimpleNamespace(perf_counter=lambda: world["now_s"])
        patched.setattr(endpoint_request_func, "time", clock)
        yield world


def write(name, rounds, root):
    """Write the record of a variant, its weights where they are, below another root."""
    (root / "weights").symlink_to(variant.repository_root() / "weights")
    return first_request.write(dataclasses.replace(variant.load(name), root=root), rounds, command=["x"])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two rounds of a variant that drafts: the record, and the stand-ins in order."""
    with stand_ins() as world:
        path = write("tiny-mtp4", 2, tmp_path_factory.mktemp("repository"))
    return SimpleNamespace(path=path, record=store.read(path, FirstRequest), servers=world["started"])


def test_a_cold_first_request_is_seen_and_a_warm_one_passes(run):
    assert run.record.verdicts == {"chat": "pass", "completion": "pass"}
    ratios = run.record.first_over_steady
    assert (ratios.warmed.chat.value, ratios.warmed.completion.value) == (1.0, 1.0)
    # Of two starts, each kind was the very first once, and eight times as slow.
    for ratio in (ratios.bare.chat, ratios.bare.completion):
        assert ratio.value == pytest.approx(8**0.5)
        assert ratio.low < 1 < 8 < ratio.high


def test_both_servers_are_asked_the_same_and_nothing_twice(run):
    names = [server.name for server in run.servers]
    assert names == ["warmed", "bare", "prompted", "bare", "warmed", "prompted"]
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
    middle = QUESTION_TOKENS["completion"]
    lengths = [len(prompt) for prompt in prompts]
    assert lengths[:4] == [middle, middle + 1, middle - 1, middle + 2]
    assert len(set(lengths)) == 1 + first_request.STEADY_REQUESTS
    chats = QUESTION_TOKENS["chat"] - first_request.STEADY_REQUESTS // 2
    assert max(lengths) < chats


def test_a_record_has_a_table(run):
    (table,) = run.record.tables(run.path)
    shown = {row[0]: row[1:] for row in table.rows}
    assert shown["first chat, warmed"] == ("10.0", "10.0", "1.00", "1.00 to 1.00", "pass")
    assert shown["first chat, bare"][:3] == ("45.0", "10.0", "2.83")
    assert shown["chats, new system prompt"] == ("80.0", "10.0", "8.00", "8.00 to 8.00", "")
    notes = "\n".join(table.notes)
    assert "found 1024 of them in the cache (blocks of 128)" in notes
    assert OFF in notes


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"log": SHORT}, "expected a chat prefix in the prefix cache, but .*whole blocks of 2048 tokens"),
        ({"warm_hits": 896}, "found 896 tokens in the prefix cache where the warm-up had left 1024"),
        ({"cold_hits": 128}, "with a new system prompt found tokens in the prefix cache"),
        ({"tokens": 3}, "answered 3 of 16 tokens"),
    ],
)
def test_what_is_not_what_it_is_measured_for_is_no_measurement(tmp_path, changed, reason):
    with stand_ins(**changed), pytest.raises(BenchError, match=reason):
        write("tiny", 2, tmp_path)


def test_one_round_is_refused_before_anything_starts(tmp_path):
    with stand_ins() as world, pytest.raises(TooFewItemsError, match="2 or more"):
        write("tiny", 1, tmp_path)
    assert world["started"] == []
