"""What a fuzz sees of a server that refuses as it should, and of ones that do not."""

import json
from functools import partial

import pytest

from slimqwen import variant
from slimqwen.bench import BenchError, client
from slimqwen.bench.fuzz import Fuzz, measurement, requests
from slimqwen.records import provenance
from slimqwen.serving.shared_server import ServerLostError
from tests.bench.fake_process import fake_process

ANSWERS = """
served = 0
def do_GET(self):
    if self.path == "/openapi.json":
        prompt = {"type": "object", "required": ["prompt"], "properties": {"prompt": {"type": "string"}}}
        body = {"required": True, "content": {"application/json": {"schema": prompt}}}
        paths = {
            "/v1/completions": {"post": {"requestBody": body, "responses": {}}}, "/health": {"get": {"responses": {}}},
        }
        document = {"openapi": "3.1.0", "info": {"title": "fake", "version": "1"}, "paths": paths}
        return self.say(200, json.dumps(document).encode())
    if self.path == "/health":
        return self.say(503 if fault == "unready" else 200, b"{}")
    running = 1 if fault == "hangs" else 0
    self.say(200, f"vllm:num_requests_running {running}\\nvllm:num_requests_waiting 0\\n".encode())
def post(self, content):
    Handler.served += 1
    if fault == "dies" and self.served > 200: os._exit(1)
    if fault == "closes" and self.served == 20: return self.connection.shutdown(2)
    try:
        body = json.loads(content)
        whole = body["ignore_eos"] and body["max_tokens"] == 4
    except (ValueError, KeyError, TypeError, RecursionError):
        if fault == "drawn 500" and content.startswith(b'{"prompt":'): return self.say(500, b"{}")
        if fault == "500" and b"structured_outputs" in content: return self.say(500, b"{}")
        if fault == "accepts": return self.say(200, b"{}")
        return self.say(400, b"{}" if fault == "mute" else b'{"error": {"message": "no"}}')
    tokens = 3 if fault == "short" else 4
    self.say(200, json.dumps({"usage": {"completion_tokens": tokens}}).encode())
"""
fake = partial(fake_process, ANSWERS)


def test_a_server_that_refuses_with_a_reason_passes():
    with fake("none") as (url, pid):
        found = measurement.probe(url, pid, 3)

    assert (found["faults"], found["harm"], found["verdict"]) == ((), (), "pass")
    assert found["endpoints"] == 2
    written = len(requests.BODIES) + len(requests.UNSENDABLE) + len(requests.REQUESTS)
    assert sum(found["requests"].values()) > written
    assert set(found["requests"]) <= {measurement.ANSWERED, measurement.REFUSED}


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        ("500", "500"),
        ("drawn 500", "500"),
        ("mute", "400 without a reason"),
        ("accepts", "answered, though it makes no sense"),
        ("closes", "lost: RemoteProtocolError"),
    ],
)
def test_each_fault_is_named_with_its_request_and_fails(fault, outcome):
    with fake(fault) as (url, pid):
        found = measurement.probe(url, pid, 3)

    assert found["verdict"] == "fail"
    assert {each.outcome for each in found["faults"]} == {outcome}
    assert all("/" in each.request for each in found["faults"])
    assert found["requests"][outcome] >= len(found["faults"]) > 0


@pytest.mark.parametrize(
    ("fault", "harm"),
    [("unready", "was not ready"), ("short", "gave no whole answer"), ("hangs", "1 requests never ended")],
)
def test_harm_is_named_and_fails(fault, harm, monkeypatch):
    monkeypatch.setattr(client, "_DRAIN_TIMEOUT_S", 1)
    with fake(fault) as (url, pid):
        found = measurement.probe(url, pid, 1)

    assert found["verdict"] == "fail"
    assert len(found["harm"]) == 1
    assert harm in found["harm"][0]


def test_a_server_that_ends_is_lost():
    with fake("dies") as (url, pid), pytest.raises(ServerLostError):
        measurement.probe(url, pid, 1)


def test_no_request_is_no_fuzz(tmp_path):
    with pytest.raises(BenchError, match="test nothing; give 1 or more"):
        measurement.write(variant.load("tiny"), 0, tmp_path / "log", command=["slimqwen"])


def test_a_record_names_the_first_fault_in_its_finding(tmp_path):
    with fake("500") as (url, pid):
        found = measurement.probe(url, pid, 1)
    root = variant.repository_root()
    block = provenance.circumstances(root, ["slimqwen", "bench", "fuzz"], provenance.utc_now())
    record = Fuzz(variant="tiny", provenance=block, **found)

    outcomes, faults = record.tables(tmp_path / "fuzz.json")
    assert ("500", f"{found['requests']['500']:,}") in outcomes.rows
    assert faults.rows[0][0] == "500"
    json.dumps(record.as_json())
