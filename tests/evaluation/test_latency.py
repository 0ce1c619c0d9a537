import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimqwen.evaluation import latency, served
from slimqwen.evaluation.statistics import TooFewItemsError
from slimqwen.records import store
from slimqwen.variant import load, repository_root

CLASSES = latency.load_workload("classes", repository_root())
WORKLOAD = """\
documents: book.txt
seed: 1
reference_context_tokens: 256
min_tokens: 4
concurrency: 3
warmup_requests: 1
rounds: 2
sampling: {temperature: 0}
classes:
  short: {prompt_tokens: 8, output_tokens: 10, requests: 3}
  long: {prompt_tokens: 200, output_tokens: 40, requests: 2}
"""


def row(ttft_ms=100.0, itl_ms=(10.0, 10.0, 10.0), error=None):
    e2el_ms = ttft_ms + sum(itl_ms)
    return {
        "output_tokens": len(itl_ms) + 1,
        "ttft_ms": ttft_ms,
        "tpot_ms": sum(itl_ms) / len(itl_ms),
        "e2el_ms": e2el_ms,
        "itl_ms": list(itl_ms),
        "error": error,
    }


def test_a_summary_counts_only_what_succeeded():
    summary = latency.summarise([row(100), row(300), row(9000, error="gone")], duration_s=2)
    assert (summary["request_count"], summary["failure_count"]) == (3, 1)
    assert summary["request_throughput_per_s"] == 1
    assert summary["output_throughput_tokens_per_s"] == 4
    assert summary["ttft_ms"] == {"mean": 200, "standard_error": pytest.approx(100), "median": 200}
    assert summary["e2el_ms"]["mean"] == 230


def test_intervals_count_each_but_requests_are_the_units():
    summary = latency.summarise([row(itl_ms=[10.0] * 9), row(itl_ms=[100.0])], duration_s=1)
    assert summary["itl_ms"]["mean"] == pytest.approx(19)
    assert summary["itl_ms"]["median"] == 10
    assert summary["tpot_ms"]["mean"] == pytest.approx(55)


@pytest.mark.parametrize(("requests", "shown"), [(9, set()), (10, {"p90"}), (100, {"p90", "p99"})])
def test_percentiles_appear_only_where_the_sample_supports_them(requests, shown):
    summary = latency.summarise([row(float(n)) for n in range(requests)], duration_s=1)
    for measure in ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms"):
        assert set(summary[measure]) - {"mean", "standard_error", "median"} == shown


def test_failures_alone_give_no_figure():
    with pytest.raises(TooFewItemsError):
        latency.summarise([row(), row(error="gone")], duration_s=1)


@given(st.integers(256, 100_000))
def test_scaled_classes_fit_the_context_and_keep_their_order(context):
    short, medium, long = CLASSES.scaled(context)
    assert all(c.prompt_tokens + c.output_tokens <= context for c in (short, medium, long))
    assert short.prompt_tokens < medium.prompt_tokens < long.prompt_tokens
    if context >= CLASSES.reference_context_tokens:
        assert (short, medium, long) == CLASSES.classes


def test_the_lengths_that_the_workload_file_states_come_out():
    assert [(c.prompt_tokens, c.output_tokens) for c in CLASSES.scaled(1024)] == [
        (16, 16),
        (248, 31),
        (992, 31),
    ]


def test_a_context_too_short_for_any_class_is_refused():
    with pytest.raises(latency.WorkloadError, match="VLLM_MAX_MODEL_LEN"):
        CLASSES.scaled(20)


@pytest.mark.parametrize("content", [None, "classes: {short: {prompt_tokens: 8}}", "nonsense: 1", "[", ""])
def test_a_bad_workload_is_named(tmp_path, content):
    file = tmp_path / "eval" / "workloads" / "mine.yaml"
    file.parent.mkdir(parents=True)
    if content is not None:
        file.write_text(content)
    with pytest.raises(latency.WorkloadError, match=r"eval/workloads/mine\.yaml"):
        latency.load_workload("mine", tmp_path)


@pytest.fixture
def workload(tmp_path):
    file = tmp_path / "eval" / "workloads" / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(WORKLOAD)
    words = [f"{n % 200} {n // 200}" for n in range(2000)]
    (tmp_path / "book.txt").write_text("\n\n".join(" ".join(words[n : n + 10]) for n in range(0, 2000, 10)))
    return latency.load_workload("mine", tmp_path)


@pytest.fixture
def measure(monkeypatch, workload):
    """Measure served stand-ins; returns the records' paths and the order in which servers were used."""

    def run(*served_variants, **arguments):
        by_name = {one.variant.name: one for one in served_variants}
        order = []

        @contextlib.contextmanager
        def serve(variant, **_):
            order.append(variant.name)
            yield by_name[variant.name]

        monkeypatch.setattr(latency, "serve", serve)
        variants = [one.variant for one in served_variants]
        return latency.measure(variants, workload, command=["scripts/eval_latency.py"], **arguments), order

    return run


def prompts_of(server):
    return [tuple(request["prompt"]) for request in server.requests]


def test_variants_take_turns_and_get_the_same_prompts(measure, add_served, stand_in):
    servers = stand_in(), stand_in()
    paths, order = measure(*(add_served(name, server) for name, server in zip("ab", servers, strict=True)))
    assert order == ["a", "b", "a", "b"]
    first, second = map(prompts_of, servers)
    assert sorted(first) == sorted(second)
    assert len(set(first)) == len(first) == 2 * (2 * 1 + 3 + 2)
    records = [store.read(path) for path in paths]
    assert records[0]["run"] == records[1]["run"]
    assert [record["interleaved_with"] for record in records] == [["b"], ["a"]]
    assert records[0]["classes"]["long"]["prompts_sha256"] == records[1]["classes"]["long"]["prompts_sha256"]


def test_one_variant_keeps_its_server_and_its_record_says_what_was_sent(measure, add_served, stand_in, capfd):
    server, told = stand_in(), []
    (path,), order = measure(add_served("tiny", server), progress=lambda *step: told.append(step))
    assert order == ["tiny"]
    record, items = store.read(path), store.read_items(path)
    assert (record["scale"], record["rounds"]) == (0.5, 2)
    short, long = record["classes"]["short"], record["classes"]["long"]
    assert (short["prompt_tokens"], short["output_tokens"], short["request_count"]) == (4, 5, 6)
    assert (long["prompt_tokens"], long["output_tokens"], long["named_prompt_tokens"]) == (100, 20, 200)
    assert long["failure_count"] == 0
    assert long["acceptance"] is None
    assert [(i["class"], i["round"]) for i in items].count(("long", 1)) == 2
    assert {(len(r["prompt"]), r["max_tokens"]) for r in server.requests} == {(4, 5), (100, 20)}
    assert all(r["ignore_eos"] and r["temperature"] == 0 for r in server.requests)
    assert set(record["provenance"]["datasets"]) == {"eval/workloads/mine.yaml", "book.txt"}
    assert told[-1] == ("tiny: long 100 -> 20 tokens", 4, 4)
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("lives_for", [0, 2, 6, 11])
def test_a_server_that_dies_is_an_error_and_leaves_no_record(measure, add_served, stand_in, lives_for):
    alive, dying = add_served("alive", stand_in()), add_served("dying", stand_in(lives_for))
    with pytest.raises(served.ServerLostError, match="nothing was recorded"):
        measure(alive, dying)
    for one in (alive, dying):
        assert not [file for file in one.variant.folder.iterdir() if "latency" in file.name]


def test_a_stream_that_ends_early_is_a_failure(workload):
    sent = latency._Sent()
    c = latency.PromptClass("short", 4, 5, 2)
    result = {
        "duration": 1.0,
        "output_lens": [5, 3],
        "ttfts": [0.1, 0.1],
        "latencies": [0.5, 0.3],
        "errors": ["", ""],
        "itls": [[0.1] * 4, [0.1] * 2],
    }
    latency._add(sent, c, 0, [[1] * 4, [2] * 4], result)
    assert [r["error"] for r in sent.rows] == [None, "the stream ended after 3 of 5 tokens"]


def test_acceptance_is_pooled_over_rounds():
    sent = latency._Sent()
    c = latency.PromptClass("short", 4, 5, 1)
    base = {
        "duration": 1.0,
        "output_lens": [5],
        "ttfts": [0.1],
        "latencies": [0.5],
        "errors": [""],
        "itls": [[0.1]],
    }
    for drafts, accepted, rates in ((10, 15, [1.0, 0.5]), (30, 15, [0.5, 0.0])):
        result = base | {
            "spec_decode_num_drafts": drafts,
            "spec_decode_draft_tokens": 2 * drafts,
            "spec_decode_accepted_tokens": accepted,
            "spec_decode_per_position_acceptance_rates": rates,
        }
        latency._add(sent, c, 0, [[1] * 4], result)
    acceptance = latency._acceptance(sent)
    assert acceptance["length"] == pytest.approx(1 + 30 / 40)
    assert acceptance["per_position_rates"] == pytest.approx([25 / 40, 5 / 40])
    assert acceptance["draft_tokens"] == 80


@pytest.mark.parametrize("rounds", [0, -1])
def test_no_rounds_are_refused_before_anything_starts(measure, add_served, stand_in, rounds):
    with pytest.raises(latency.WorkloadError, match="1 or more"):
        measure(add_served("tiny", stand_in()), rounds=rounds)


@pytest.mark.engine
def test_a_real_server_is_timed(tiny_server, tmp_path, monkeypatch):
    tiny = load("tiny")
    running = served.Served(tiny, tiny_server, True, served.max_model_len(tiny_server.base_url))
    monkeypatch.setattr(latency, "serve", lambda *_, **__: contextlib.nullcontext(running))
    few = tuple(latency.PromptClass(name, 100, 150, 3) for name in ("one", "two"))
    workload = latency.Workload(**(vars(CLASSES) | {"classes": few, "warmup_requests": 1, "rounds": 1}))
    (path,) = latency.measure(
        [tiny], workload, command=["scripts/eval_latency.py"], records_folders=[tmp_path / "tiny"]
    )
    record = store.read(path)
    for c in record["classes"].values():
        assert (c["request_count"], c["failure_count"]) == (3, 0)
        assert 0 < c["ttft_ms"]["mean"] < c["e2el_ms"]["mean"]
        assert c["e2el_ms"]["mean"] == pytest.approx(
            c["ttft_ms"]["mean"] + c["tpot_ms"]["mean"] * (c["output_tokens"] - 1)
        )
    assert record["provenance"]["checkpoint"]["path"] == "weights/tiny"


def test_of_a_failure_its_last_line_is_kept():
    sent = latency._Sent()
    error = "Traceback\n  File x\nServerDisconnectedError: gone\n"
    result = {
        "duration": 1.0,
        "output_lens": [0],
        "ttfts": [0.0],
        "latencies": [0.0],
        "errors": [error],
        "itls": [[]],
    }
    latency._add(sent, latency.PromptClass("short", 4, 5, 1), 0, [[1] * 4], result)
    assert sent.rows[0]["error"] == "ServerDisconnectedError: gone"
