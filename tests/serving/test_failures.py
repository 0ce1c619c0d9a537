"""What clients and orchestrators see when things go wrong, on real servers: one for the clients' faults, one that dies.

The last test of each ends its server.
"""

import json
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.serving import malformed_requests, real_server
from tests.serving.real_server import PATIENCE_S, QUEUE, RUNNING

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

LONG = {"prompt": "The", "max_tokens": 2000, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with real_server.started(tmp_path_factory.mktemp("failures")) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    # The server closes connections that are idle for 5 s, as httpx does: the same moment would be a race.
    reused = httpx.Limits(keepalive_expiry=2)
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S, trust_env=False, limits=reused) as http:
        yield http


def full_answer(client, tokens=4):
    answer = client.post("/v1/completions", json={"prompt": "The", "max_tokens": tokens, "ignore_eos": True})
    return answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == tokens


def serves(server, client):
    """Whether the server is idle and healthy, and every place in its queue is to be had."""
    now = server.wait_for(running=0, waiting=0)
    with ThreadPoolExecutor(QUEUE) as pool:
        answers = list(pool.map(lambda _: full_answer(client), range(QUEUE)))
    return now["vllm:kv_cache_usage_perc"] == 0 and all(answers) and real_server.is_ready(server.url)


def test_clients_that_hang_up_free_what_they_held_streamed_or_not_running_or_waiting(server):
    before = server.wait_for(running=0, waiting=0)
    streams = [server.connect("/v1/completions", LONG | {"stream": True}) for _ in range(3)]
    for stream in streams:
        real_server.read_until(stream, b"data: ")
    others = [server.connect("/v1/completions", LONG) for _ in range(3)]
    server.wait_for(running=RUNNING, waiting=2)
    for one in (*streams, *others):
        one.close()
    after = server.wait_for(running=0, waiting=0)
    usage = "vllm:kv_cache_usage_perc"
    assert after[usage] == before[usage] == 0
    tokens = "vllm:generation_tokens_total"
    assert after[tokens] - before[tokens] < 4 * LONG["max_tokens"]


def unread_bytes(server, stream):
    """What the kernel holds of the server's answer because its client does not read."""
    ports = [int(server.url.rpartition(":")[2]), stream.getsockname()[1]]
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, _, queues, *_ = line.split()
        if [int(address.rpartition(":")[2], 16) for address in (local, remote)] == ports:
            return int(queues.partition(":")[0], 16)
    return 0


def test_clients_that_do_not_read_hold_up_nobody_and_lose_nothing(server, client):
    body = LONG | {"max_tokens": 150, "stream": True, "logprobs": 5}
    slow = [server.connect("/v1/completions", body, receive_buffer_bytes=4096) for _ in range(4)]
    assert all(full_answer(client) for _ in range(4))
    server.wait_for(running=0, waiting=0)
    for stream in slow:
        assert unread_bytes(server, stream) > 0
    assert serves(server, client)
    for stream in slow:
        answer = real_server.read_rest(stream)
        assert b'"finish_reason":"length"' in answer
        assert b"data: [DONE]" in answer


@pytest.mark.parametrize("body", malformed_requests.UNSENDABLE, ids=json.dumps)
def test_what_cannot_be_sent_to_the_engine_is_refused_and_takes_no_place_in_the_queue(server, client, body):
    for _ in range(2 * QUEUE):
        answer = client.post("/v1/completions", json={"prompt": "The", "max_tokens": 2, **body})
        assert answer.status_code == 400, answer.text
        assert "out of range" in answer.json()["error"]["message"]
    assert serves(server, client)


@pytest.mark.parametrize(("path", "body"), malformed_requests.CHOSEN_LOGPROBS, ids=lambda one: str(one)[:20])
def test_what_drafts_have_no_log_probabilities_for_is_refused(server, client, path, body):
    answer = client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert "not supported with speculative decoding" in answer.json()["error"]["message"]
    assert serves(server, client)


def test_malformed_requests_are_refused_with_a_reason_and_it_serves_as_before(server, client):
    family = server.family()
    outcomes = list(malformed_requests.sent(client))
    assert not [f"{answer.status_code} {sent}" for sent, answer, is_right in outcomes if not is_right]
    assert all(process.is_running() for process in family)
    server.wait_for(running=0, waiting=0)
    assert serves(server, client)


def is_cut(answer):
    """Whether an answer is a 503 with Retry-After, or a stream that has begun and ends with such an error."""
    head, _, body = answer.lower().partition(b"\r\n\r\n")
    if head.startswith(b"http/1.1 503"):
        return b"retry-after: 5" in head and b'"error"' in body
    return head.startswith(b"http/1.1 200") and re.search(rb'data: {"error".*"code": ?503', body) is not None


def is_complete(answer):
    """Whether an answer has all its tokens, be it a stream or one JSON object."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if said := re.search(rb"(?i)content-length: (\d+)", head):
        return b'"finish_reason":"length"' in body and len(body) == int(said[1])
    return b'"finish_reason":"length"' in body and b"data: [DONE]" in body


def assert_cut(answers):
    """Every answer is cut. One that runs may come to its end before the signal does; none that waits can."""
    kept = [answer for answer in answers if not is_cut(answer)]
    for answer in kept:
        assert is_complete(answer), answer[-2000:].decode()
    assert len(kept) <= RUNNING


def test_hung_up_it_refuses_what_it_cuts_and_ends_with_what_it_started_though_a_client_does_not_read(
    server,
):
    """A hang-up ends it as SIGTERM does, by that signal."""
    family, segments, sockets = server.family(), server.segments(), server.socket_folders()
    assert sockets
    slow = server.connect(
        "/v1/completions", LONG | {"stream": True, "logprobs": 5}, receive_buffer_bytes=4096
    )
    streams = [server.connect("/v1/completions", LONG | {"stream": True}) for _ in range(QUEUE // 2)]
    others = [server.connect("/v1/completions", LONG) for _ in range(QUEUE // 2 - 1)]
    server.wait_for(running=RUNNING, waiting=QUEUE - RUNNING)
    server.process.send_signal(signal.SIGHUP)
    assert_cut([real_server.read_rest(client) for client in (*streams, *others)])
    assert server.process.wait(PATIENCE_S) == 0
    slow.close()
    assert real_server.ended(family, 30)
    assert not [path for path in sockets if path.exists()]
    # On a busy host vLLM may kill an engine that has not ended in 5 s, which then leaves its segments.
    if "force killing" not in server.log.read_text():
        assert not [path for path in segments if path.exists()]


def test_a_killed_engine_ends_the_server_with_a_failure_and_leaves_nothing(tmp_path):
    with real_server.started(tmp_path) as server:
        family, segments = server.family(), server.segments()
        assert segments
        [engine] = [one for one in family if "EngineCore" in " ".join(one.cmdline())]
        reader = server.connect("/v1/completions", LONG | {"stream": True})
        slow = server.connect("/v1/completions", LONG | {"stream": True}, receive_buffer_bytes=4096)
        begun = real_server.read_until(reader, b"data: ")
        others = [
            server.connect("/v1/completions", LONG | {"stream": number % 2 == 0})
            for number in range(QUEUE - 2)
        ]
        server.wait_for(running=RUNNING, waiting=QUEUE - RUNNING)
        killed = time.monotonic()
        engine.kill()
        while real_server.is_ready(server.url):
            assert time.monotonic() - killed < PATIENCE_S
        assert server.process.wait(PATIENCE_S) == 1
        assert time.monotonic() - killed < PATIENCE_S
        assert_cut([begun + real_server.read_rest(reader), *map(real_server.read_rest, others)])
        slow.close()
        assert "EngineDiedError" in server.log.read_text()
        assert real_server.ended(family, 30), [one for one in family if one.is_running()]
        assert not [file for file in segments if file.exists()]
