"""What a soak sees: on the real server for seconds, and on one that leaks, forgets, lies or dies."""

import json
from collections import Counter
from functools import partial

import httpx
import pytest

from slimqwen import variant
from slimqwen.bench import BenchError, client
from slimqwen.bench.soak import load, measurement
from slimqwen.serving.shared_server import ServerLostError
from slimqwen.stats.verdict import Verdict
from tests.bench.fake_process import fake_process

ANSWERS = """
kept, files = [], []
def do_GET(self):
    if self.path == "/health":
        return self.say(503 if fault == "unready" else 200, b"")
    if self.path == "/v1/models":
        return self.say(200, b'{"data": [{"max_model_len": 2048}]}')
    used = 0.5 if fault == "cache" else 0
    running = 1 if fault == "hangs" else 0
    text = f"vllm:num_requests_running {running}\\nvllm:num_requests_waiting 0\\nvllm:kv_cache_usage_perc {used}\\n"
    self.say(200, b"" if fault == "counts nothing" else text.encode(), "text/plain")
def post(self, content):
    if fault == "leaks": self.kept.append(bytearray(1 << 20))
    if fault == "files": self.files.append(open(os.devnull))
    if fault == "dies" and len(content) % 7 == 0: os._exit(1)
    time.sleep(0.01)
    try:
        body = json.loads(content)
        tokens = body["max_tokens"]
        assert tokens < 5000
    except (ValueError, KeyError, AssertionError):
        return self.say(400, b'{"error": {"message": "no"}}')
    if fault == "plain": return self.say(500, b"Internal Server Error", "text/plain")
    if fault == "no chats" and "chat" in self.path: return self.say(400, b'{"error": {"message": "no template"}}')
    if fault == "no streams" and tokens > 100: return self.say(400, b'{"error": {"message": "too long"}}')
    if fault == "short": tokens -= 1
    usage = {"completion_tokens": tokens}
    last = {"choices": [{"finish_reason": "length"}], "usage": usage}
    if body.get("stream"):
        return self.say(200, f"data: {json.dumps(last)}\\n\\ndata: [DONE]\\n\\n".encode(), "text/event-stream")
    self.say(200, json.dumps(last).encode())
"""
fake = partial(fake_process, ANSWERS)


@pytest.mark.engine
def test_a_real_server_ends_every_request_and_holds_nothing(tiny_server):
    seen = []
    result = measurement.load_and_watch(
        tiny_server.base_url, tiny_server.pid, 8, clients=3, progress=lambda *now: seen.append(now)
    )
    # Eight seconds cannot tell a leak from noise; what they can tell is asserted.
    assert set(result["requests"]) <= {"answered", "refused", "overload"}
    assert result["requests"]["answered"] > 10
    assert result["requests"]["refused"] > 1
    assert result["streams_left"] > 0
    assert result["kv_cache_used"] == 0
    assert result["by_process"][0].process == "API server"
    assert all("/" not in one.process for one in result["by_process"])
    assert len(result["by_process"]) >= 3
    assert result["resident_mib"].end > 1000
    assert [fault for fault in result["faults"] if not fault.startswith("memory grew")] == []
    assert seen[-1] == ("soaking, seconds", 8, 8)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("leaks", "memory grew"),
        ("files", "more files are open"),
        ("cache", "the KV cache is not empty"),
        ("unready", "the server is not ready"),
        ("short", "not as long as requested"),
        ("plain", "500 for a request to /v1/"),
        ("hangs", "1 requests never ended"),
        ("no streams", "no stream was open to be left"),
    ],
)
def test_each_fault_of_a_server_is_named_and_fails(fault, said, monkeypatch):
    monkeypatch.setattr(client, "_DRAIN_TIMEOUT_S", 1)
    with fake(fault) as (url, pid):
        # Memory and files need more time to grow beyond what is noise.
        seconds = 4 if fault in ("leaks", "files") else 2
        result = measurement.load_and_watch(url, pid, seconds, clients=2)
    assert result["verdict"] == Verdict.FAIL
    assert any(said in each for each in result["faults"]), result["faults"]
    assert len(result["requests"]) < 10


def test_a_server_without_faults_has_none_and_one_without_chats_is_asked_for_none():
    for kind, chats in (("none", True), ("no chats", False)):
        with fake(kind) as (url, pid):
            result = measurement.load_and_watch(url, pid, 2, clients=2)
        assert result["chats"] is chats
        assert [fault for fault in result["faults"] if not fault.startswith("memory grew")] == []


def test_a_server_that_counts_nothing_is_refused_before_the_load():
    with fake("counts nothing") as (url, pid), pytest.raises(BenchError, match="VLLM_DISABLE_LOG_STATS"):
        measurement.load_and_watch(url, pid, 4, clients=2)


@pytest.mark.parametrize("seconds", [0, -5, 59, float("nan")])
def test_a_soak_too_short_to_tell_is_refused_before_anything_starts(seconds, tmp_path):
    with pytest.raises(BenchError, match="too short to judge"):
        measurement.write(variant.load("tiny"), seconds, tmp_path / "log", command=["x"])
    assert not (tmp_path / "log").exists()


def test_a_server_that_ends_under_the_load_is_an_error_and_no_result():
    with fake("dies") as (url, pid), pytest.raises(ServerLostError, match="lost under the load"):
        measurement.load_and_watch(url, pid, 60, clients=2)


def test_clients_get_the_files_that_they_need_or_the_limit_is_named(monkeypatch):
    limits, given = [1024, 20000], []
    monkeypatch.setattr(measurement.resource, "getrlimit", lambda which: tuple(limits))
    monkeypatch.setattr(measurement.resource, "setrlimit", lambda which, both: given.append(both))
    measurement.allow_connections(100)
    assert given == []
    measurement.allow_connections(1024)
    assert given == [(1152, 20000)]
    with pytest.raises(BenchError, match="20128 open files and 20000 are allowed"):
        measurement.allow_connections(20000)
    limits[:] = [measurement.resource.RLIM_INFINITY] * 2
    measurement.allow_connections(20000)
    assert len(given) == 1


@pytest.mark.parametrize(("mib_per_second", "value"), [(0.0, 0.0), (30 / 3600, 30.0), (-1 / 3600, -1.0)])
def test_growth_is_told_in_mib_an_hour_and_one_jump_does_not_make_it(mib_per_second, value):
    points = [(5.0 * n, 1000 + 5.0 * n * mib_per_second) for n in range(60)]
    points[30] = (150.0, 2000.0)
    result = measurement.growth(points)
    assert result.value == pytest.approx(value, abs=1e-6)
    assert result.low <= result.value <= result.high


def answer(status, body, **headers):
    return httpx.Response(status, json=body, headers=headers)


@pytest.mark.parametrize(
    ("number", "given", "said"),
    [
        (1, answer(429, {"error": {"message": "full"}}, **{"Retry-After": "1"}), "overload"),
        (1, answer(429, {"error": {"message": "full"}}), "429 says nothing"),
        (7, answer(400, {"error": {"message": "not JSON"}}), "refused"),
        (7, answer(500, {"error": {"message": "oh"}}), "500 for"),
        (7, answer(200, {"choices": []}), "200 for"),
        (1, answer(500, {"error": {}}), "500 for"),
        (0, httpx.Response(200, text='data: {"choices": []}\n\n'), "a stream of /v1/completions was cut off"),
        (0, httpx.Response(200, text=""), "200 that cannot be read"),
        (1, httpx.Response(429, text="slow down"), "429 that cannot be read"),
        (7, httpx.Response(500, text="Internal Server Error"), "500 for a malformed request"),
    ],
)
def test_every_ending_has_a_name(number, given, said):
    assert load.outcome(load.question(number), given).startswith(said)


def test_the_load_is_of_both_kinds_streamed_or_not_and_in_part_malformed():
    asked = [load.question(number) for number in range(64)]
    kinds = Counter((one.path, one.streams, one.tokens is None) for one in asked)
    assert len({(path, streams) for path, streams, refused in kinds if not refused}) == 4
    assert sum(count for (_, _, refused), count in kinds.items() if refused) == 8
    for one in asked:
        if one.tokens is not None:
            assert json.loads(one.content)["max_tokens"] == one.tokens
