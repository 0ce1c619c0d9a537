import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from slimqwen.evaluation import latency, served
from slimqwen.evaluation import workload as workloads
from slimqwen.evaluation.statistics import TooFewItemsError
from slimqwen.evaluation.workload import PromptClass, ServiceLevel, WorkloadError
from slimqwen.records import store
from slimqwen.report import tables
from slimqwen.serving import platform as machine
from slimqwen.variant import load, repository_root

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
        "prompt_tokens": 6,
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
    assert summary["total_throughput_tokens_per_s"] == 4 + 6
    assert summary["ttft_ms"] == {"mean": 200, "standard_error": pytest.approx(100), "median": 200}
    assert summary["e2el_ms"]["mean"] == 230


def test_intervals_count_each_but_requests_are_the_units():
    summary = latency.summarise([row(itl_ms=[10.0] * 9), row(itl_ms=[100.0])], duration_s=1)
    assert summary["itl_ms"]["mean"] == pytest.approx(19)
    assert summary["itl_ms"]["median"] == 10
    assert summary["tpot_ms"]["mean"] == pytest.approx(55)


@pytest.mark.parametrize(
    ("requests", "shown"), [(9, set()), (10, {"p90"}), (20, {"p90", "p95"}), (100, {"p90", "p95", "p99"})]
)
def test_percentiles_appear_only_where_the_sample_supports_them(requests, shown):
    summary = latency.summarise([row(float(n)) for n in range(requests)], duration_s=1)
    for measure in ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms"):
        assert set(summary[measure]) - {"mean", "standard_error", "median"} == shown


def test_failures_alone_give_no_figure():
    with pytest.raises(TooFewItemsError):
        latency.summarise([row(), row(error="gone")], duration_s=1)


def test_goodput_counts_the_requests_that_meet_both_limits():
    rows = [row(100), row(900), row(100, itl_ms=[90.0] * 3), row(100, error="gone")]
    level = ServiceLevel(ttft_ms=500, tpot_ms=50)
    assert latency.summarise(rows, 2, level)["goodput"] == {
        "ttft_ms": 500,
        "tpot_ms": 50,
        "good_count": 1,
        "requests_per_s": 0.5,
    }
    assert latency.summarise(rows, 2)["goodput"] is None


@pytest.fixture
def write_workload(tmp_path):
    """Write eval/workloads/mine.yaml, its classes and fields over those above, and the text that it cuts."""

    def write(classes=None, **fields):
        file = tmp_path / "eval" / "workloads" / "mine.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        content = {**yaml.safe_load(WORKLOAD), **fields}
        file.write_text(
            yaml.safe_dump({**content, "classes": classes or content["classes"]}, sort_keys=False)
        )
        words = [f"{n % 200} {n // 200}" for n in range(2000)]
        (tmp_path / "book.txt").write_text(
            "\n\n".join(" ".join(words[n : n + 10]) for n in range(0, 2000, 10))
        )
        return workloads.load("mine", tmp_path)

    return write


@pytest.fixture
def measure(monkeypatch, write_workload):
    """Measure served stand-ins; returns the records' paths and the order in which servers were used."""

    def run(*served_variants, workload=None, **arguments):
        by_name = {one.variant.name: one for one in served_variants}
        order = []

        @contextlib.contextmanager
        def serve(variant, **_):
            order.append(variant.name)
            yield by_name[variant.name]

        monkeypatch.setattr(latency, "serve", serve)
        variants = [one.variant for one in served_variants]
        chosen = workload or write_workload()
        return latency.measure(variants, chosen, command=["scripts/eval_latency.py"], **arguments), order

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


def test_one_variant_has_a_fresh_server_a_round_and_its_record_says_what_was_sent(
    measure, add_served, stand_in, capfd
):
    server, told = stand_in(), []
    (path,), order = measure(add_served("tiny", server), progress=lambda *step: told.append(step))
    assert order == ["tiny", "tiny"]
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


def test_whole_rounds_of_an_interrupted_run_are_not_sent_again(measure, add_served, stand_in):
    """A round is 7 requests: the second variant's server dies in the second of three rounds."""
    whole_server, dying_server = stand_in(), stand_in(lives_for=9)
    whole, dying = add_served("whole", whole_server), add_served("dying", dying_server)
    with pytest.raises(served.ServerLostError, match="1 of 3 rounds are kept: the same command goes on"):
        measure(whole, dying, rounds=3)
    first = prompts_of(whole_server)
    dying_server.lives_for = None
    dying_server.requests.clear()
    paths, order = measure(whole, dying, rounds=3)
    assert order == ["whole", "dying"] * 2
    records = [store.read(path) for path in paths]
    assert [record["rounds_of_earlier_run"] for record in records] == [1, 1]
    assert [record["rounds"] for record in records] == [3, 3]
    for path in paths:
        sent = [(item["class"], item["round"]) for item in store.read_items(path)]
        assert sent == [("short", n) for n in (0, 0, 0, 1, 1, 1, 2, 2, 2)] + [
            ("long", n) for n in (0, 0, 1, 1, 2, 2)
        ]
    assert records[0]["classes"]["long"]["prompts_sha256"] == records[1]["classes"]["long"]["prompts_sha256"]
    # The first round's prompts are in nobody's cache a second time; the round that broke off is sent anew.
    again = prompts_of(whole_server)[len(first) :]
    assert not set(first[:7]) & set(again)
    # What is finished is forgotten: the next run begins at its first round.
    assert measure(whole, dying, rounds=3)[1] == ["whole", "dying"] * 3


def test_a_run_of_other_rounds_or_another_workload_begins_anew(measure, add_served, stand_in, write_workload):
    whole_server, dying_server = stand_in(), stand_in(lives_for=9)
    whole, dying = add_served("whole", whole_server), add_served("dying", dying_server)
    with pytest.raises(served.ServerLostError):
        measure(whole, dying)
    dying_server.lives_for = None
    assert len(measure(whole, dying, rounds=3)[1]) == 6
    assert len(measure(whole, dying, workload=write_workload(seed=2))[1]) == 4
    assert len(measure(whole, dying)[1]) == 2


SHORT = PromptClass(name="short", prompt_tokens=4, output_tokens=5, requests=2)


def test_a_stream_that_ends_early_is_a_failure():
    sent = latency._Sent()
    result = {
        "duration": 1.0,
        "output_lens": [5, 3],
        "ttfts": [0.1, 0.1],
        "latencies": [0.5, 0.3],
        "errors": ["", ""],
        "itls": [[0.1] * 4, [0.1] * 2],
    }
    latency._add(sent, SHORT, 0, [([1] * 4, 5), ([2] * 4, 5)], result)
    assert [r["error"] for r in sent.rows] == [None, "the stream ended after 3 of 5 tokens"]


def test_acceptance_is_pooled_over_rounds():
    sent = latency._Sent()
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
        latency._add(sent, SHORT, 0, [([1] * 4, 5)], result)
    acceptance = latency._acceptance(sent)
    assert acceptance["length"] == pytest.approx(1 + 30 / 40)
    assert acceptance["per_position_rates"] == pytest.approx([25 / 40, 5 / 40])
    assert acceptance["draft_tokens"] == 80


@pytest.mark.parametrize("rounds", [0, -1])
def test_no_rounds_are_refused_before_anything_starts(measure, add_served, stand_in, rounds):
    with pytest.raises(WorkloadError, match="1 or more"):
        measure(add_served("tiny", stand_in()), rounds=rounds)


THREE_WAYS = {
    "single": {"prompt_tokens": 8, "output_tokens": 4, "requests": 3, "concurrency": 1},
    "upfront": {"prompt_tokens": 8, "output_tokens": 4, "requests": 3, "concurrency": "unlimited"},
    "staggered": {"prompt_tokens": 8, "output_tokens": 4, "requests": 3, "gap_ms": 5},
    "load": {"prompt_tokens": 8, "output_tokens": 4, "requests": 3, "load": [0.5, 1], "load_of": "upfront"},
}


def test_requests_come_as_their_class_says_and_variants_get_the_same_arrivals(
    measure, add_served, stand_in, write_workload, monkeypatch
):
    from vllm.benchmarks import serve as client

    asked, stock = [], client.benchmark

    async def benchmark(**keywords):
        asked.append((keywords["request_rate"], keywords["burstiness"], keywords["max_concurrency"]))
        drawn.append(np.random.get_state()[1][:3].tolist())
        return await stock(**keywords)

    drawn = []
    monkeypatch.setattr(client, "benchmark", benchmark)
    one = write_workload(
        THREE_WAYS, warmup_requests=0, rounds=1, service_level={"ttft_ms": 60_000, "tpot_ms": 60_000}
    )
    first, second = measure(add_served("a", stand_in()), add_served("b", stand_in()), workload=one)[0]
    a, b = store.read(first)["classes"], store.read(second)["classes"]
    saturation = a["upfront"]["request_throughput_per_s"]
    assert asked[:3] == [(np.inf, 1.0, 1), (np.inf, 1.0, None), (200.0, np.inf, None)]
    assert [rate for rate, burstiness, _ in asked[3:5]] == pytest.approx([saturation / 2, saturation])
    assert asked[3:5] == asked[8:10]
    assert drawn[:5] == drawn[5:]
    for name in a:
        assert a[name]["arrival"] == b[name]["arrival"]
        assert a[name]["goodput"]["good_count"] == 3
    assert a["upfront"]["arrival"] is None
    assert a["upfront"]["concurrency"] is None
    assert a["staggered"]["arrival"] == {"process": "fixed gap", "rate_per_s": 200.0}
    assert a["load-0.5"]["arrival"]["process"] == "Poisson"


def test_lengths_with_a_spread_differ_and_are_what_is_asked_of_the_server(
    measure, add_served, stand_in, write_workload
):
    classes = {"mixed": {"prompt_tokens": 20, "output_tokens": 8, "requests": 6, "spread": 0.5}}
    server = stand_in()
    one = write_workload(classes, warmup_requests=0, rounds=2, reference_context_tokens=64)
    (path,), _ = measure(add_served("a", server), workload=one)
    asked = {(len(r["prompt"]), r["max_tokens"]) for r in server.requests}
    assert len(asked) > 6
    assert store.read(path)["classes"]["mixed"]["failure_count"] == 0
    assert asked == {(i["prompt_tokens"], i["output_tokens"]) for i in store.read_items(path)}


PREFIXES = {
    "cold": {"prompt_tokens": 75, "suffix_tokens": 6, "output_tokens": 4, "requests": 2},
    "warm": {"prompt_tokens": 75, "suffix_tokens": 6, "output_tokens": 4, "requests": 4, "repeats": "cold"},
}


@pytest.fixture
def prefix_cache(monkeypatch):
    """A server's metrics: blocks of 16, and hits as the test says of each class in turn."""

    def make(hits=(0, 64), enabled="True"):
        counted = iter([value for hit in hits for value in ((0.0, 0.0), (100.0, float(hit)))])

        def metrics(*_):
            config = {"enable_prefix_caching": enabled, "effective_attention_block_size": "16"}
            return {"vllm:cache_config_info": (1.0, config)}

        monkeypatch.setattr(latency, "_metrics", metrics)
        monkeypatch.setattr(latency, "_prefix_counts", lambda *_: next(counted))

    return make


def test_repeated_prefixes_are_whole_blocks_and_their_suffixes_are_new(
    measure, add_served, stand_in, write_workload, prefix_cache
):
    prefix_cache()
    server = stand_in()
    one = write_workload(PREFIXES, warmup_requests=0, rounds=1, concurrency=1, reference_context_tokens=128)
    (path,), _ = measure(add_served("a", server), workload=one)
    prompts = prompts_of(server)
    cold, warm = prompts[:2], prompts[2:]
    assert {len(prompt) for prompt in prompts} == {4 * 16 + 6}
    assert [prompt[:64] for prompt in warm] == [cold[n % 2][:64] for n in range(4)]
    assert len({prompt[64:] for prompt in prompts}) == 6
    warm = store.read(path)["classes"]["warm"]["prefix_cache"]
    assert {key: warm[key] for key in ("block_tokens", "prefix_tokens", "hit_tokens", "queried_tokens")} == {
        "block_tokens": 16,
        "prefix_tokens": 64,
        "hit_tokens": 64,
        "queried_tokens": 100,
    }
    assert warm["repeat_speedup"]["value"] > 0
    (row,) = [row for row in tables.results_table(path).rows if row[0].startswith("warm")]
    assert row[0] == "warm 70 -> 4"


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"hits": (0, 0)}, "the prefix cache had none of the 100 tokens of class warm"),
        ({"hits": (16, 64)}, "knew 16 tokens of class cold before it was sent"),
        ({"enabled": "False"}, "does no prefix caching for this model"),
    ],
)
def test_a_repetition_that_the_server_did_not_find_is_no_measurement(
    measure, add_served, stand_in, write_workload, prefix_cache, metrics, said
):
    prefix_cache(**metrics)
    one = write_workload(PREFIXES, warmup_requests=0, rounds=1)
    served_one = add_served("a", stand_in())
    with pytest.raises(WorkloadError, match=said):
        measure(served_one, workload=one)
    assert not list(served_one.variant.folder.glob("latency_*"))


def test_a_workload_that_needs_prefix_caching_is_served_without_mtp_on_a_cpu():
    one = workloads.load("prefix_cache", repository_root())
    without, lines = latency._with_config(load("tiny"), one)
    assert without.settings["VLLM_ENABLE_PREFIX_CACHING"].value == "1"
    assert lines == {"VLLM_ENABLE_PREFIX_CACHING": "1"}
    changed, lines = latency._with_config(load("tiny-mtp4"), one)
    assert "VLLM_SPECULATIVE_CONFIG" not in changed.settings
    assert lines == {"VLLM_ENABLE_PREFIX_CACHING": "1", "VLLM_SPECULATIVE_CONFIG": ""}


def test_modes_found_unsafe_on_this_build_are_a_reason_to_serve_without_mtp(monkeypatch):
    def find(root, weights, flags, platform):
        if flags.get("speculative-config"):
            return SimpleNamespace(modes="MTP K=4, prefix caching", reason="tokens differ", record="x.json")
        return None

    # A platform that takes both, as a GPU does.
    monkeypatch.setattr(machine, "GPU_ONLY", ())
    monkeypatch.setattr(latency.unsafe_engines, "find", find)
    one = workloads.load("prefix_cache", repository_root())
    changed, lines = latency._with_config(load("tiny-mtp4"), one)
    assert lines["VLLM_SPECULATIVE_CONFIG"] == ""
    assert "VLLM_SPECULATIVE_CONFIG" not in changed.settings
    monkeypatch.setattr(
        latency.unsafe_engines, "find", lambda *_: find(None, None, {"speculative-config": 1}, "")
    )
    with pytest.raises(WorkloadError, match=r"tokens differ \(x\.json\)"):
        latency._with_config(load("tiny-mtp4"), one)


def test_a_line_that_the_platform_cannot_serve_is_one_error_with_the_reason():
    one = workloads.load("prefix_cache", repository_root())
    one = one.model_copy(update={"config": {"VLLM_CUDAGRAPH_CAPTURE_SIZES": "1,2"}})
    with pytest.raises(WorkloadError, match="a CPU has no CUDA graphs"):
        latency._with_config(load("tiny-mtp4"), one)


def test_a_sweep_of_the_concurrency_covers_the_most_capable_variant():
    one = workloads.load("concurrency", repository_root())
    assert latency._max_num_seqs([load("tiny"), load("tiny-seq8")], one) == 8
    assert latency._max_num_seqs([load("tiny")], one) == 1


@pytest.mark.engine
def test_a_real_server_is_timed(tiny_server, tmp_path, monkeypatch):
    tiny = load("tiny")
    running = served.Served(tiny, tiny_server, True, served.max_model_len(tiny_server.base_url))
    monkeypatch.setattr(latency, "serve", lambda *_, **__: contextlib.nullcontext(running))
    file = tmp_path / "eval" / "workloads" / "few.yaml"
    file.parent.mkdir(parents=True)
    few = {
        "single": {"prompt_tokens": 40, "output_tokens": 16, "requests": 3},
        "poisson": {"prompt_tokens": 40, "output_tokens": 16, "requests": 3, "rate_per_s": 50},
    }
    content = {**yaml.safe_load(WORKLOAD), "documents": "tinyworld", "concurrency": 1, "rounds": 1}
    file.write_text(yaml.safe_dump({**content, "classes": few}))
    workload = workloads.load("few", tmp_path)
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
    found = latency._metrics(running, tmp_path / "log")["vllm:cache_config_info"][1]
    assert int(found["effective_attention_block_size"]) > 0
    with pytest.raises(WorkloadError, match="does no prefix caching"):
        latency._block_tokens(running, tmp_path / "log")


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
    latency._add(sent, SHORT, 0, [([1] * 4, 5)], result)
    assert sent.rows[0]["error"] == "ServerDisconnectedError: gone"
