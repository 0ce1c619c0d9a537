"""Shapes of load against a stand-in: what each begins its prompts with, and that the server found it in its cache."""

import pytest

from slimqwen.bench import BenchError
from slimqwen.records import store
from slimqwen.report import tables
from slimqwen.serving import shared_server
from tests.bench.conftest import prompts_of

pytestmark = pytest.mark.usefixtures("stamps")

PREFIXES = {
    "cold": {"prompt_tokens": 85, "output_tokens": 4, "requests": 2},
    "warm": {"prompt_tokens": 85, "output_tokens": 4, "requests": 4},
}
CACHED = {"VLLM_ENABLE_PREFIX_CACHING": "1"}


def test_repeated_prefixes_are_whole_blocks_and_their_suffixes_are_new(
    measure, add_served, stand_in, write_workload
):
    server = stand_in()
    server.cached_tokens = lambda body: 64 * (len(server.requests) > 2)
    fields = {"warmup_requests": 0, "rounds": 1, "concurrency": 1, "reference_context_tokens": 128}
    one = write_workload(PREFIXES, shape="prefixes", config=CACHED, **fields)
    (path,), _ = measure(add_served("a", server), workload=one)
    prompts = prompts_of(server)
    cold, warm = prompts[:2], prompts[2:]
    assert {len(prompt) for prompt in prompts} == {4 * 16 + 16}
    assert [prompt[:64] for prompt in warm] == [cold[n % 2][:64] for n in range(4)]
    assert len({prompt[64:] for prompt in prompts}) == 6
    warm = store.read_record(path).classes["warm"].prefix_cache
    assert (warm.block_tokens, warm.prefix_tokens) == (16, 64)
    assert (warm.hit_tokens, warm.queried_tokens) == (4 * 64, 4 * 100)
    assert warm.repeat_speedup.value > 0
    (row,) = [row for row in tables.results_table(path).rows if row[0].startswith("warm")]
    assert row[0] == "warm 80 -> 4"


@pytest.mark.parametrize(
    ("cached_tokens", "reason"),
    [
        (
            lambda sent: 0,
            "had 0 of the 400 tokens of class warm, less than a block of 16 for each prompt of cold",
        ),
        (lambda sent: 15 * (sent > 2), "had 60 of the 400 tokens of class warm"),
        (lambda sent: 16, "had 32 tokens of class cold before it was sent"),
        (None, "does no prefix caching for this model"),
    ],
)
def test_a_repetition_that_the_server_did_not_find_is_no_measurement(
    measure, add_served, stand_in, write_workload, cached_tokens, reason
):
    server = stand_in()
    server.cached_tokens = cached_tokens and (lambda body: cached_tokens(len(server.requests)))
    one = write_workload(PREFIXES, shape="prefixes", config=CACHED, warmup_requests=0, rounds=1)
    served = add_served("a", server)
    with pytest.raises(BenchError, match=reason):
        measure(served, workload=one)
    assert not list(served.variant.folder.glob("latency_*"))


SESSIONS = {
    "first": {"prompt_tokens": 40, "output_tokens": 4, "requests": 2},
    "second": {"prompt_tokens": 80, "output_tokens": 4, "requests": 2},
    "end": {"prompt_tokens": 200, "output_tokens": 4, "requests": 2},
}


def test_a_session_sends_its_whole_context_at_each_turn_and_ends_with_that_of_the_server(
    measure, add_served, stand_in, write_workload
):
    server, other = stand_in(), stand_in()
    server.cached_tokens = other.cached_tokens = lambda body: len(body["prompt"]) // 80 * 32
    other.text = "salt "
    fields = {"warmup_requests": 1, "rounds": 2, "concurrency": 1, "reference_context_tokens": 128}
    one = write_workload(SESSIONS, shape="sessions", config=CACHED, **fields)
    paths, _ = measure(add_served("a", server), add_served("b", other), workload=one)
    turns = []
    for each in (server, other):
        # One warm-up request a round; what its client leaves is sent too.
        assert sorted(map(len, prompts_of(each))) == [40] * 10 + [80] * 8 + [124] * 8
        by_length = {size: {p for p in prompts_of(each) if len(p) == size} for size in (40, 80, 124)}
        assert {prompt[:40] for prompt in by_length[80]} < by_length[40]
        assert {prompt[:80] for prompt in by_length[124]} == by_length[80]
        turns.append({prompt[:40]: prompt[40:] for prompt in by_length[80]})
    # Responses are part of the context, but for those that nobody waited for; after them all variants get one text.
    unknown, salt = (1,), (9,) * 4
    assert turns[0].keys() == turns[1].keys()
    for first, text in turns[0].items():
        same = turns[1][first]
        has_response = text[:1] == unknown
        assert (same[:4] == salt) == has_response
        assert text[has_response:][:36] == same[4 * has_response :][:36]
    assert sum(text[:1] == unknown for text in turns[0].values()) == 4
    record, items = store.read_record(paths[0]), store.read_items(paths[0])
    assert [item["prompt_tokens"] for item in items] == [40] * 4 + [80] * 4 + [124] * 4
    caches = [row.prefix_cache for row in record.classes.values()]
    assert [(c.repeats, c.prefix_tokens) for c in caches] == [(None, 32), ("first", 32), ("second", 80)]
    assert [c.hit_tokens for c in caches] == [0, 2 * 4 * 32, 2 * 4 * 32]
    assert all(c.repeat_speedup is None for c in caches)
    assert "Prefixes of 32, 80 tokens, whole blocks of 16" in tables.results_table(paths[0]).notes[1]


def test_a_request_that_is_refused_while_its_client_would_leave_is_an_error(
    measure, add_served, stand_in, write_workload
):
    server = stand_in()
    server.refuses = lambda body: not body.get("stream_options")  # which the timed requests have
    one = write_workload({"only": SESSIONS["first"]}, shape="sessions", rounds=1)
    with pytest.raises(
        shared_server.ServerLostError, match="measuring a: only: HTTP 503; nothing was recorded"
    ):
        measure(add_served("a", server), workload=one)
