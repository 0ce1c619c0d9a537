"""A tuning over servers that stand in for vLLM: who takes turns, who is out and why, what comes of an interruption."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slimqwen import host_load
from slimqwen.bench import BenchError
from slimqwen.bench.workload import Workload
from slimqwen.host_load import HostBusyError
from slimqwen.records import store
from slimqwen.search import SearchError
from slimqwen.search.tune import Tune, tune_variant, tuner
from slimqwen.search.tune.arms import KEY, UNDRAFTED, Arm, find_refused_fields
from slimqwen.search.tune.changes import SettingsChange
from slimqwen.search.tune.responses import WrongResponsesError
from slimqwen.stats.verdict import Verdict
from slimqwen.variant import Variant
from tests.search.tune.conftest import PROMPTS, Servers
from tests.search.tune.turns import K2, K4, NGRAM, ROUNDING, SECOND, SLOW, WINNER, WRONG

Run = Callable[..., tuple[Tune, Path]]


@pytest.fixture
def run(subject: Variant, servers: Servers, few_responses: None, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Tune the variant over some arms; the record and its file."""

    def tune(
        *arms: Arm, loads: Sequence[int] | None = (1, 4), minutes: float = 10, **more: Any
    ) -> tuple[Tune, Path]:
        monkeypatch.setattr(tuner, "list_arms", lambda served: list(arms))
        path = tune_variant(subject, loads, minutes=minutes, command=["slimqwen", "tune"], **more)
        return store.read_record(path, Tune), path

    return tune


@pytest.fixture
def planted(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have planted changes tried beside an arm, and served at these speeds."""

    def plant(beside: Arm, speeds: Sequence[tuple[SettingsChange, float]], *more: SettingsChange) -> None:
        for change, speed in speeds:
            servers.add(replace(beside, parts=(change,)), speed)
        tried = [*(change for change, _ in speeds), *more]
        monkeypatch.setattr(tuner, "list_changes", lambda figures, **_: tried)

    return plant


def test_arms_take_turns_until_the_winner_is_clear_and_slow_ones_end_early(
    run: Run, servers: Servers
) -> None:
    servers.add(UNDRAFTED, speed=1)
    servers.add(K2, speed=5)
    servers.add(K4, speed=0.3)
    record, path = run(UNDRAFTED, K2, K4)
    assert servers.starts == ["none", "MTP K=2", "MTP K=4", *["none", "MTP K=2"] * 2]
    assert (record.verdict, record.chosen) == (Verdict.PASS, "MTP K=2")
    assert record.lines == {
        KEY: '\'{"method": "mtp", "num_speculative_tokens": 2}\'',
        "VLLM_MAX_NUM_SEQS": "4",
    }
    by_name = {arm.name: arm for arm in record.arms}
    assert [arm.name for arm in record.arms] == ["MTP K=2", "none", "MTP K=4"]
    assert (by_name["MTP K=4"].ended, by_name["MTP K=4"].rounds) == ("surely slower than the best", 1)
    assert list(by_name["MTP K=2"].loads) == ["1", "4"]
    assert (by_name["MTP K=2"].loads["1"].ttft_ms, by_name["none"].loads["1"].ttft_ms) == (2, 10)
    assert (by_name["none"].loads["1"].tokens_per_second, by_name["none"].loads["4"].tokens_per_second) == (
        16,
        64,
    )
    assert (record.workload, record.temperature, record.sequences) == ("mine", 0, 4)
    items = store.read_items(path)
    assert len(items) == 2 * len(servers.starts)
    assert (items[0]["arm"], items[0]["round"], items[0]["load"], items[0]["output_tokens"]) == (
        "none",
        0,
        "1",
        16,
    )
    assert not list((path.parents[2] / ".cache" / "tune").glob("*"))
    # The prompts, and what the comparison of responses reads.
    names = {Path(name).name for name in record.provenance.datasets}
    assert names == {"own.yaml", "prompts.jsonl", "tinyworld.yaml#engine", "tinyworld_passages.jsonl"}


def test_every_round_sends_the_same_requests_and_responses_are_compared_once(
    run: Run, servers: Servers
) -> None:
    servers.add(UNDRAFTED, speed=1)
    servers.add(K2, speed=5)
    run(UNDRAFTED, K2)
    requests = servers.by_arm["MTP K=2"].requests
    compared = [each for each in requests if each.get("return_token_ids")]
    assert all(each["temperature"] == 0 and each["repetition_penalty"] == 1 for each in compared)
    lengths = [len(each["prompt"]) for each in compared]
    assert len(lengths) == 2 * len(set(lengths)) > 40
    timed = [tuple(each["prompt"]) for each in requests if each.get("stream")]
    warmed_up = 3 * 2 * 2  # rounds, loads, requests
    assert len(timed) == 3 * 2 * len(PROMPTS) + warmed_up
    assert len(set(timed)) == len(PROMPTS) + 2


def test_an_arm_is_out_whose_responses_differ_that_dies_or_that_vllm_refuses(
    run: Run, servers: Servers
) -> None:
    servers.add(UNDRAFTED, speed=1)
    servers.add(K2, token=6)
    servers.add(K4, lives_for=3)
    servers.refused[NGRAM.name] = "vLLM knows no such method"
    record, _ = run(UNDRAFTED, K2, K4, NGRAM)
    ended = {arm.name: arm.ended for arm in record.arms}
    assert ended["MTP K=2"].startswith(
        "22 of 22 greedy responses, 1 at a time, differ from the undrafted engine's beyond near ties"
    )
    assert "comparing its responses" in ended["MTP K=4"]
    assert ended["ngram K=4"] == "vLLM knows no such method"
    assert servers.starts == ["none", "MTP K=2", "MTP K=4"]
    assert (record.verdict, record.chosen, record.fastest) == (Verdict.FAIL, "none", None)
    assert all(not arm.loads for arm in record.arms if arm.speculation)


def test_drafts_are_out_where_the_prompts_have_fields_that_they_refuse(
    run: Run, servers: Servers, subject: Variant
) -> None:
    file = subject.root / "eval" / "own" / "mine" / "prompts.jsonl"
    first, *others = map(json.loads, file.read_text().splitlines())
    lines = [{**first, "logprob_token_ids": [5], "min_p": 0.1}, *others]
    file.write_text("".join(json.dumps(each) + "\n" for each in lines))
    servers.add(UNDRAFTED)
    record, _ = run(UNDRAFTED, K2)
    (drafted,) = (arm for arm in record.arms if arm.speculation)
    assert (
        drafted.ended
        == "1 of 4 prompts of mine have logprob_token_ids, which drafts refuse here (status 400)"
    )
    assert servers.starts == ["none"]
    assert (record.verdict, record.chosen) == (Verdict.FAIL, "none")


def test_what_drafts_refuse_depends_on_the_platform(subject: Variant) -> None:
    workload = Workload.load("mine", subject.root)
    sampled = workload.model_copy(update={"sampling": {"temperature": 1.0, "min_p": 0.1}})
    assert find_refused_fields(workload, subject.root, "cuda") == ""
    assert find_refused_fields(sampled, subject.root, "cpu") == ""
    refused = find_refused_fields(sampled, subject.root, "cuda")
    assert refused == "all requests of mine have min_p, which drafts refuse here (status 400)"


def test_an_arm_with_failed_requests_is_out(run: Run, servers: Servers) -> None:
    servers.add(UNDRAFTED)
    servers.add(K2, lives_for=50)  # after the comparison and some timed requests
    record, _ = run(UNDRAFTED, K2)
    (arm,) = (arm for arm in record.arms if arm.speculation)
    assert arm.ended
    assert "comparing" not in arm.ended
    assert not arm.loads


def test_an_undrafted_server_with_other_responses_than_the_plain_engine_ends_it(
    run: Run, servers: Servers
) -> None:
    servers.add(UNDRAFTED, token=6)
    with pytest.raises(WrongResponsesError, match="greedy responses"):
        run(UNDRAFTED, K2)


def test_a_variant_that_vllm_refuses_without_drafts_is_an_error(run: Run, servers: Servers) -> None:
    servers.refused["none"] = "no such flag"
    with pytest.raises(SearchError, match=r"without drafts .no such flag.; correct its config"):
        run(UNDRAFTED, K2)


def test_the_same_command_continues_and_measures_nothing_twice(run: Run, servers: Servers) -> None:
    for arm, speed in ((UNDRAFTED, 1), (K2, 5), (K4, 0.3)):
        servers.add(arm, speed)
    servers.interrupt_at = 4
    with pytest.raises(KeyboardInterrupt):
        run(UNDRAFTED, K2, K4)
    servers.interrupt_at = None
    record, path = run(UNDRAFTED, K2, K4)
    assert servers.starts == ["none", "MTP K=2", "MTP K=4", "none", "MTP K=2", "none", "MTP K=2"]
    assert record.chosen == "MTP K=2"
    assert [item["round"] for item in store.read_items(path)] == [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]


def test_no_turn_begins_when_the_minutes_are_used_up(run: Run, servers: Servers) -> None:
    servers.add(UNDRAFTED, speed=2)
    servers.add(K2, speed=8)
    record, _ = run(UNDRAFTED, K2, K4, minutes=0.0001)
    assert servers.starts == ["none"]
    assert (record.verdict, record.chosen, record.lines) == (Verdict.INCONCLUSIVE, None, {})
    assert {arm.ended for arm in record.arms} == {"", "it had no turn in the given time"}
    servers.add(K4, speed=0.1)
    time.sleep(1)  # the name of a record has its second
    record, _ = run(UNDRAFTED, K2, K4)
    assert servers.starts[:3] == ["none", "MTP K=2", "MTP K=4"]
    assert [arm.name for arm in record.arms if arm.rounds] != ["none"]


def test_of_flags_a_winner_is_found_a_slow_one_and_a_wrong_one_end_and_what_paid_is_united(
    run: Run, servers: Servers, planted: Callable[..., None]
) -> None:
    servers.add(UNDRAFTED, speed=1)
    servers.add(K2, speed=5)
    planted(K2, [(WINNER, 8), (SECOND, 6), (SLOW, 3), (WRONG, 20)])
    servers.by_arm["MTP K=2, wrong one"].token = 6
    servers.add(replace(K2, parts=(WINNER, SECOND)), speed=9)
    record, path = run(UNDRAFTED, K2, flags="exact")
    singles, union = record.flags
    assert (singles.reference, union.reference) == ("MTP K=2", "MTP K=2")
    ended = {arm.name.removeprefix("MTP K=2, "): arm.ended for arm in singles.arms}
    assert ended.pop("wrong one").startswith("22 of 22 greedy responses")
    assert ended == {
        "MTP K=2": "",
        "winner": "pays alone",
        "second winner": "pays alone",
        "slow one": "surely slower than it",
    }
    # Own prompts are sent once: at another load a prefix cache would have them.
    assert all(list(arm.loads) in (["4", "sessions"], []) for arm in singles.arms)
    assert record.chosen == "MTP K=2, winner, second winner"
    assert record.lines == {
        KEY: '\'{"method": "mtp", "num_speculative_tokens": 2}\'',
        "VLLM_MAX_NUM_SEQS": "4",
        "VLLM_ENABLE_PREFIX_CACHING": "1",
        "VLLM_MAX_NUM_BATCHED_TOKENS": "64",
    }
    assert record.winner is not None
    assert not record.winner.needs_gate
    advice = " ".join(record.advice)
    assert (
        "Flags pay: MTP K=2, winner, second winner is 1.80 [1.80, 1.80] times as fast as MTP K=2 over"
        in advice
    )
    titles = [table.title for table in record.tables(path)]
    assert titles == ["Speculation of v", "Serving flags of v, one at a time", "Serving flags of v, united"]


def test_a_flag_that_rounds_otherwise_needs_the_gate(
    run: Run, servers: Servers, planted: Callable[..., None]
) -> None:
    servers.add(UNDRAFTED, speed=1)
    planted(UNDRAFTED, [(ROUNDING, 2)])
    servers.by_arm["none, 16-bit states"].token = 6
    record, path = run(UNDRAFTED, flags="lossy")
    assert record.chosen == "none, 16-bit states"
    assert record.winner is not None
    assert record.winner.needs_gate
    assert "none, 16-bit states needs the gate: it rounds numbers otherwise." in record.advice
    assert not [each for each in servers.by_arm[record.chosen].requests if each.get("return_token_ids")]
    assert {row[1] for row in record.tables(path)[-1].rows} == {"chosen; needs the gate", "measured"}


def test_where_no_flag_pays_it_says_so(run: Run, servers: Servers, planted: Callable[..., None]) -> None:
    servers.add(UNDRAFTED, speed=1)
    planted(UNDRAFTED, [(SLOW, 0.5), (WINNER, 1)])
    record, _ = run(UNDRAFTED, flags="exact", sessions=False)
    (singles,) = record.flags
    assert {arm.name: arm.ended for arm in singles.arms} == {
        "none": "",
        "none, slow one": "surely slower than it",
        "none, winner": "no gain over all loads in 5 rounds",
    }
    assert "No serving flag pays beside none: 2 were tried." in record.advice
    assert (record.chosen, record.is_decided) == ("none", True)


def test_a_prefix_cache_that_no_compared_response_came_from_is_not_trusted(
    run: Run, servers: Servers, planted: Callable[..., None]
) -> None:
    servers.add(UNDRAFTED, speed=1)
    planted(UNDRAFTED, [(WINNER, 2), (SECOND, 2)])
    servers.by_arm["none, winner"].cached_tokens = lambda _: 0
    servers.by_arm["none, second winner"].cached_tokens = lambda _: 16
    record, _ = run(UNDRAFTED, flags="exact")
    ended = {arm.name: arm.ended for arm in record.flags[0].arms}
    assert ended["none, winner"].startswith("no compared response came from the prefix cache")
    assert ended["none, second winner"] == "pays alone"


def test_a_change_that_changes_nothing_here_is_not_served(
    run: Run, servers: Servers, planted: Callable[..., None]
) -> None:
    servers.add(UNDRAFTED, speed=1)
    graphs = SettingsChange("graphs", {"VLLM_CUDAGRAPH_CAPTURE_SIZES": "5"})
    adaptive = SettingsChange("adaptive", speculation={"enable_adaptive_verification": True})
    planted(UNDRAFTED, [], graphs, adaptive)
    record, _ = run(UNDRAFTED, flags="exact")
    ended = [arm.ended for arm in record.flags[0].arms if arm.name != "none"]
    assert ended == ["it changes nothing on this device"] * 2
    assert set(servers.starts) == {"none"}


def test_undecided_drafts_leave_half_of_the_minutes_to_flags_beside_the_variants_own(
    run: Run, servers: Servers, planted: Callable[..., None]
) -> None:
    servers.add(UNDRAFTED, speed=1)
    planted(UNDRAFTED, [(WINNER, 2)])
    record, _ = run(UNDRAFTED, K2, minutes=0.0001, flags="exact")
    assert [each.reference for each in record.flags] == ["none"]
    assert record.verdict == record.flags[0].verdict == Verdict.INCONCLUSIVE
    assert not record.is_decided


@pytest.mark.parametrize(
    ("lines", "loads"),
    [({"VLLM_MAX_NUM_SEQS": "2"}, ["1", "2"]), ({"VLLM_MAX_NUM_SEQS": "8"}, ["1", "4"])],
    ids=["as many as it runs", "as many as there are prompts"],
)
def test_loads_are_those_that_the_variant_and_its_prompts_allow(
    subject: Variant,
    servers: Servers,
    monkeypatch: pytest.MonkeyPatch,
    lines: dict[str, str],
    loads: list[str],
) -> None:
    servers.add(UNDRAFTED)
    monkeypatch.setattr(tuner, "list_arms", lambda served: [UNDRAFTED])
    path = tune_variant(subject.with_lines(lines), None, minutes=1, command=["slimqwen"])
    record = store.read_record(path, Tune)
    assert list(record.arms[0].loads) == loads
    assert record.sequences is None


def test_a_load_needs_as_many_prompts(run: Run, servers: Servers) -> None:
    with pytest.raises(
        BenchError, match=r"prompts.jsonl: 4 prompts are too few for a load of 5; .* lower --load"
    ):
        run(UNDRAFTED, loads=(1, 5))


def test_classes_of_a_workload_are_sent_at_every_load(
    subject: Variant, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers.add(UNDRAFTED)
    monkeypatch.setattr(tuner, "list_arms", lambda served: [UNDRAFTED])
    classes = subject.with_lines({"EVALUATION": "tinyworld"})
    record = store.read_record(tune_variant(classes, (1, 4), minutes=1, command=["slimqwen"]), Tune)
    assert (record.workload, list(record.arms[0].loads)) == ("classes", ["1", "4"])
    timed = [each for each in servers.by_arm["none"].requests if each.get("stream")]
    requests = 16 + 6 + 3 + 16 + 8 + 8
    assert len(timed) == requests + 2 * 3 * 2


def test_responses_of_random_weights_are_not_compared(
    subject: Variant, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers.add(UNDRAFTED, token=6)
    monkeypatch.setattr(tuner, "list_arms", lambda served: [UNDRAFTED])
    random = subject.with_lines({"VLLM_LOAD_FORMAT": "dummy"})
    record = store.read_record(tune_variant(random, (1,), minutes=1, command=["slimqwen"]), Tune)
    assert record.near_tie_nats is None


def test_on_a_busy_host_nothing_is_recorded_and_finished_turns_are_kept(
    run: Run, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers.add(UNDRAFTED, speed=1)
    servers.add(K2, speed=5)
    stock = host_load.retry_until_idle

    def busy(measure: Any, name: str, **options: Any) -> Any:
        if name == "MTP K=2, round 1" and not options["even_if_busy"]:
            raise HostBusyError("host too busy")
        return stock(measure, name, **options)

    monkeypatch.setattr(tuner.host_load, "retry_until_idle", busy)
    with pytest.raises(HostBusyError):
        run(UNDRAFTED, K2)
    monkeypatch.setattr(tuner.host_load, "retry_until_idle", stock)
    record, _ = run(UNDRAFTED, K2)
    assert servers.starts[:2] == ["none", "MTP K=2"]
    assert json.loads(json.dumps(record.as_json()))["verdict"] == "pass"
