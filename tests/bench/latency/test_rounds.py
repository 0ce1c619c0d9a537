import contextlib
import gc
import itertools
import json
import math
import shutil

import numpy as np
import pytest

from slimqwen import host_load
from slimqwen.bench import BenchError, latency
from slimqwen.bench.latency import measured_variant, rounds
from slimqwen.bench.workload import PromptClass, Workload
from slimqwen.checkpoint import MissingCheckpointError
from slimqwen.host_load import HostBusyError, HostLoad
from slimqwen.plan import start
from slimqwen.records import store
from slimqwen.records.pairing import NotComparableError
from slimqwen.serving import checks, shared_server
from slimqwen.serving.errors import ServingError
from slimqwen.variant import load, repository_root
from tests.bench.conftest import prompts_of

pytestmark = pytest.mark.usefixtures("stamps")


def test_variants_take_turns_and_get_the_same_prompts(measure, add_served, stand_in):
    servers = stand_in(), stand_in()
    paths, order = measure(*(add_served(name, server) for name, server in zip("ab", servers, strict=True)))
    assert order == ["a", "b", "a", "b"]
    first, second = map(prompts_of, servers)
    assert sorted(first) == sorted(second)
    assert len(set(first)) == len(first) == 2 * (2 * 1 + 3 + 2)
    records = [store.read_record(path) for path in paths]
    assert records[0].run == records[1].run
    assert [record.interleaved_with for record in records] == [("b",), ("a",)]
    assert records[0].classes["long"].prompts_sha256 == records[1].classes["long"].prompts_sha256


def test_one_variant_has_a_fresh_server_a_round_and_its_record_says_what_was_sent(
    measure, add_served, stand_in, capfd
):
    server, messages = stand_in(), []
    (path,), order = measure(add_served("tiny", server), progress=lambda *step: messages.append(step))
    assert order == ["tiny", "tiny"]
    record, items = store.read_record(path), store.read_items(path)
    assert (record.scale, record.rounds) == (0.5, 2)
    short, long = record.classes["short"], record.classes["long"]
    assert (short.prompt_tokens, short.output_tokens, short.request_count) == (4, 5, 6)
    assert (long.prompt_tokens, long.output_tokens, long.named_prompt_tokens) == (100, 20, 200)
    assert long.failure_count == 0
    assert record.memory_bandwidth_gb_per_s == 5
    assert short.memory_limit_ms is None  # a stand-in has no checkpoint
    assert long.acceptance is None
    assert [(i["class"], i["round"]) for i in items].count(("long", 1)) == 2
    assert {(len(r["prompt"]), r["max_tokens"]) for r in server.requests} == {(4, 5), (100, 20)}
    assert all(r["ignore_eos"] and r["temperature"] == 0 for r in server.requests)
    assert set(record.provenance.datasets) == {"eval/workloads/mine.yaml", "book.txt"}
    assert messages[-1] == ("tiny: long 100 -> 20 tokens", 4, 4)
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("lives_for", [0, 2, 6, 11])
def test_a_server_that_dies_is_an_error_and_leaves_no_record(measure, add_served, stand_in, lives_for):
    alive, dying = add_served("alive", stand_in()), add_served("dying", stand_in(lives_for))
    with pytest.raises(shared_server.ServerLostError, match="nothing was recorded"):
        measure(alive, dying)
    for one in (alive, dying):
        assert not [file for file in one.variant.folder.iterdir() if "latency" in file.name]


def test_whole_rounds_of_an_interrupted_run_are_not_sent_again(measure, add_served, stand_in):
    """A round is 7 requests: the second variant's server dies in the second of three rounds."""
    whole_server, dying_server = stand_in(), stand_in(lives_for=9)
    whole, dying = add_served("whole", whole_server), add_served("dying", dying_server)
    with pytest.raises(shared_server.ServerLostError, match="rounds 1 to 1 of 3 are kept for the next run"):
        measure(whole, dying, rounds=3)
    first = prompts_of(whole_server)
    dying_server.lives_for = None
    dying_server.requests.clear()
    paths, order = measure(whole, dying, rounds=3)
    assert order == ["whole", "dying"] * 2
    records = [store.read_record(path) for path in paths]
    assert [record.rounds_of_earlier_run for record in records] == [1, 1]
    assert [record.rounds for record in records] == [3, 3]
    for path in paths:
        sent = [(item["class"], item["round"]) for item in store.read_items(path)]
        assert sent == [("short", n) for n in (0, 0, 0, 1, 1, 1, 2, 2, 2)] + [
            ("long", n) for n in (0, 0, 1, 1, 2, 2)
        ]
    assert records[0].classes["long"].prompts_sha256 == records[1].classes["long"].prompts_sha256
    # The first round's prompts are in nobody's cache a second time; the round that broke off is sent anew.
    again = prompts_of(whole_server)[len(first) :]
    assert not set(first[:7]) & set(again)
    # What is finished is forgotten: the next run begins at its first round.
    assert measure(whole, dying, rounds=3)[1] == ["whole", "dying"] * 3


def test_an_interrupt_leaves_nothing_on_the_terminal(measure, add_served, stand_in, capfd):
    def interrupt(activity, done, total):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(add_served("tiny", stand_in()), progress=interrupt)
    gc.collect()
    assert capfd.readouterr() == ("", "")


def test_a_run_of_other_rounds_or_another_workload_begins_anew(measure, add_served, stand_in, write_workload):
    whole_server, dying_server = stand_in(), stand_in(lives_for=9)
    whole, dying = add_served("whole", whole_server), add_served("dying", dying_server)
    with pytest.raises(shared_server.ServerLostError):
        measure(whole, dying)
    dying_server.lives_for = None
    assert len(measure(whole, dying, rounds=3)[1]) == 6
    other = write_workload(seed=2)
    assert len(measure(whole, dying, workload=other)[1]) == 4
    assert len(measure(whole, dying)[1]) == 2


def test_a_checkpoint_that_is_not_there_is_named_with_what_makes_it(write_workload, add_variant, tmp_path):
    add_variant("tiny", "VLLM_MODEL=weights/tiny\n")
    with pytest.raises(MissingCheckpointError, match=r"no checkpoint in .*tiny; "):
        latency.measure_latency([load("tiny", tmp_path)], write_workload(), command=[])


@pytest.mark.parametrize("rounds", [0, -1])
def test_no_rounds_are_refused_before_anything_starts(measure, add_served, stand_in, rounds):
    with pytest.raises(BenchError, match="1 or more"):
        measure(add_served("tiny", stand_in()), rounds=rounds)


THREE_WAYS = {
    "upfront": {"prompt_tokens": 8, "output_tokens": 4, "requests": 3, "concurrency": "unlimited"},
    "single": {"prompt_tokens": 8, "output_tokens": 4, "requests": 3, "concurrency": 1},
    "staggered": {"prompt_tokens": 8, "output_tokens": 4, "requests": 3, "gap_ms": 5},
    "load-0.5": {"prompt_tokens": 8, "output_tokens": 4, "requests": 3, "load": 0.5},
    "load-1": {"prompt_tokens": 8, "output_tokens": 4, "requests": 3, "load": 1},
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
    a, b = store.read_record(first).classes, store.read_record(second).classes
    saturation = a["upfront"].request_throughput_per_s
    assert asked[:3] == [(np.inf, 1.0, None), (np.inf, 1.0, 1), (200.0, np.inf, None)]
    assert [rate for rate, burstiness, _ in asked[3:5]] == pytest.approx([saturation / 2, saturation])
    assert asked[3:5] == asked[8:10]
    assert drawn[:5] == drawn[5:]
    for name in a:
        assert a[name].arrival == b[name].arrival
        assert a[name].goodput.good_count == 3
    assert a["upfront"].arrival is None
    assert a["upfront"].concurrency is None
    assert a["staggered"].arrival.as_json() == {"process": "fixed gap", "rate_per_s": 200.0}
    assert a["load-0.5"].arrival.process == "Poisson"


def test_lengths_with_a_spread_differ_and_are_what_is_asked_of_the_server(
    measure, add_served, stand_in, write_workload
):
    classes = {"mixed": {"prompt_tokens": 20, "output_tokens": 8, "requests": 6, "spread": 0.5}}
    server = stand_in()
    one = write_workload(classes, warmup_requests=0, rounds=2, reference_context_tokens=64)
    (path,), _ = measure(add_served("a", server), workload=one)
    asked = {(len(r["prompt"]), r["max_tokens"]) for r in server.requests}
    assert len(asked) > 6
    assert store.read_record(path).classes["mixed"].failure_count == 0
    assert asked == {(i["prompt_tokens"], i["output_tokens"]) for i in store.read_items(path)}


@pytest.fixture
def busy(monkeypatch):
    """Make the host too busy in some attempts at a round, counted from 0 over all rounds."""

    def make(*attempts):
        numbers = itertools.count()

        def load(_):
            share = 0.5 if next(numbers) in attempts else 0.0
            return HostLoad(seconds=1, other_share=share, client_delay_ms=None, server_delay_ms=None)

        monkeypatch.setattr(host_load, "LIMITS", host_load.LoadLimits(0.1, math.inf, math.inf))
        monkeypatch.setattr(host_load.Watch, "load", load)
        monkeypatch.setattr(host_load, "_wait_until_idle", lambda name: None)

    return make


def test_a_busy_round_is_measured_again_by_all_variants(measure, add_served, stand_in, busy):
    """A round is 7 requests, two of them for warm-up."""
    servers = stand_in(), stand_in()
    busy(0)
    paths, order = measure(
        *(add_served(name, server) for name, server in zip("ab", servers, strict=True)), rounds=2
    )
    assert order == ["a", "b"] * 3
    records = [store.read_record(path) for path in paths]
    assert [(record.rounds, record.rounds_repeated) for record in records] == [(2, 1), (2, 1)]
    digests = [[figures.prompts_sha256 for figures in record.classes.values()] for record in records]
    assert digests[0] == digests[1]
    # No server has seen a text of the repeated round before.
    prompts = prompts_of(servers[0])
    assert len(set(prompts)) == len(prompts) == 3 * 7
    assert [item["round"] for item in store.read_items(paths[1])] == [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]


def test_a_host_that_stays_busy_is_an_error_of_one_line_and_no_record(measure, add_served, stand_in, busy):
    busy(0, 1)
    served = add_served("tiny", stand_in())
    with pytest.raises(
        HostBusyError, match=r"^round 1: host too busy in both attempts: other .* 50\.0 % CPU .*; end other"
    ):
        measure(served)
    assert not list(served.variant.folder.glob("latency_*"))


def test_figures_of_a_busy_host_are_marked_and_compared_with_nothing(measure, add_served, stand_in, busy):
    busy(0, 1)
    subject, other = add_served("tiny", stand_in()), add_served("other", stand_in())
    (path,), order = measure(subject, even_if_busy=True)
    assert order == ["tiny", "tiny"]
    record = store.read_record(path)
    assert record.provenance.host_was_busy
    assert record.provenance.host_load.seconds > 0
    assert record.rounds_repeated == 0
    with pytest.raises(store.MissingRecordError):
        store.latest(subject.variant.folder, latency.Latency)
    (fine,), _ = measure(other)
    assert not store.read_record(fine).provenance.host_was_busy
    with pytest.raises(NotComparableError, match="busy host; measure again without --even-if-busy"):
        latency.comparison(fine, path)


def test_the_settings_of_a_workload_are_laid_over_the_variants_own(
    measure, add_served, stand_in, write_workload, monkeypatch
):
    monkeypatch.setattr(rounds.start, "match_flag_trouble", lambda *_: start.StartTrouble((), ()))
    server = stand_in()
    served = add_served("a", server)
    one = write_workload(config={"VLLM_MAX_NUM_SEQS": "3"})
    (path,), _ = measure(served, workload=one)
    assert store.read_record(path).config == {"VLLM_MAX_NUM_SEQS": "3"}
    with pytest.raises(BenchError, match=r"mine: tiny-mtp4 cannot be served .* a CPU has no CUDA graphs"):
        rounds._with_settings(
            load("tiny-mtp4"), write_workload(config={"VLLM_CUDAGRAPH_CAPTURE_SIZES": "1,2"})
        )


def test_known_trouble_of_the_settings_is_refused(monkeypatch):
    trouble = checks.Trouble("would give other tokens on cpu", "no drafts", "a record")
    monkeypatch.setattr(rounds.start, "match_flag_trouble", lambda *_: start.StartTrouble((trouble,), ()))
    with pytest.raises(ServingError, match="would give other tokens on cpu"):
        rounds._with_settings(load("tiny-mtp4"), Workload.load("prefix_cache", repository_root()))


def test_a_sweep_of_the_concurrency_covers_the_most_capable_variant():
    one = Workload.load("concurrency", repository_root())
    assert rounds.max_num_seqs([load("tiny"), load("cyankiwi-seq8")], one) == 8
    assert rounds.max_num_seqs([load("tiny")], one) == 1


@pytest.mark.engine
def test_a_real_server_is_timed(served_tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(rounds, "share_server", lambda *_, **__: contextlib.nullcontext(served_tiny))
    shape = {"prompt_tokens": 40, "output_tokens": 16, "requests": 3}
    few = (PromptClass(name="single", **shape), PromptClass(name="poisson", load=1, **shape))
    workload = Workload.load("classes", repository_root())
    workload = workload.model_copy(update={"classes": few, "rounds": 1, "reference_context_tokens": 256})
    (path,) = latency.measure_latency(
        [load("tiny")], workload, command=["slimqwen bench latency"], records_folders=[tmp_path / "tiny"]
    )
    record = store.read_record(path)
    for c in record.classes.values():
        assert (c.request_count, c.failure_count) == (3, 0)
        assert 0 < c.ttft_ms.mean < c.e2el_ms.mean
        assert c.e2el_ms.mean == pytest.approx(c.ttft_ms.mean + c.tpot_ms.mean * (c.output_tokens - 1))
    assert record.provenance.checkpoint.path == "weights/tiny"
    with pytest.raises(BenchError, match="does no prefix caching"):
        measured_variant.block_tokens(served_tiny)


@pytest.fixture
def own_prompts(tmp_path):
    """An own evaluation with two prompts that the stand-in's tokenizer knows."""
    folder = tmp_path / "eval" / "own" / "mine"
    folder.mkdir(parents=True)
    shutil.copy(repository_root() / "eval" / "own.yaml", tmp_path / "eval")
    (folder / "workload.yaml").write_text("{rounds: 2, warmup_requests: 1, output_tokens: 6}")
    rows = [{"prompt": "Q : what sells wool ?", "output_tokens": 9}, {"prompt": "A : town salt 1 2 3 4"}]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return Workload.load("mine", tmp_path)


def test_own_prompts_are_sent_whole_in_every_round_with_their_own_lengths(
    measure, add_served, stand_in, own_prompts
):
    server = stand_in()
    (path,), order = measure(add_served("tiny", server), workload=own_prompts)
    assert order == ["tiny", "tiny"]
    record, items = store.read_record(path), store.read_items(path)
    assert [(i["prompt_tokens"], i["output_tokens"]) for i in items] == [(6, 9), (8, 6)] * 2
    own = record.classes["own"]
    assert (own.prompt_tokens, own.output_tokens, own.request_count) == (7, 8, 4)
    files = {"eval/own.yaml", "eval/own/mine/prompts.jsonl", "eval/own/mine/workload.yaml"}
    assert files == set(record.provenance.datasets)
    warm_up, *timed = prompts_of(server)[:3]
    assert warm_up == timed[0][::-1]  # no prefix of a timed prompt is cached by it


def test_an_own_prompt_longer_than_the_context_is_named(measure, add_served, stand_in, own_prompts, tmp_path):
    file = tmp_path / "eval" / "own" / "mine" / "prompts.jsonl"
    file.write_text('{"prompt": "Q"}\n' + json.dumps({"prompt": "town " * 125}))
    with pytest.raises(BenchError, match=r"prompts\.jsonl, prompt 2: 125 \+ 6 tokens, but tiny takes 128"):
        measure(add_served("tiny", stand_in()), workload=own_prompts)
