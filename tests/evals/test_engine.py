"""The engine check: which engines there are, how responses are compared, and what a breakdown becomes."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from slimqwen import host, variant
from slimqwen.evals import EvalError
from slimqwen.evals.engine import (
    Engine,
    TokenComparison,
    compare_engine,
    compare_tokens,
    list_engines,
    measure_engine,
    reference_flags,
)
from slimqwen.evals.engine_process import SHORTEST, EngineRun, Request, Response, run_engine, run_reference
from slimqwen.evals.engine_runs import EngineProcesses
from slimqwen.evals.invocation import Invocation
from slimqwen.records import store
from slimqwen.serving.command import ServerCommand
from slimqwen.serving.errors import ServingError
from slimqwen.stats.verdict import Verdict
from slimqwen.variant import Variant
from tests.evals.test_engine_process import DRAFTS, SETTINGS, TINY


def response(*tokens: int, gap: float | None = None) -> Response:
    """The reference engine's; `gap` is how much less likely token 99 is at every position, in nats."""
    likeliest = [{token: -1.0} | ({} if gap is None else {99: -1.0 - gap}) for token in tokens]
    return Response(tokens, tuple(likeliest))


@pytest.mark.parametrize(
    ("tokens", "gap", "expected"),
    [
        ((1, 2, 3), 0.5, TokenComparison(3, False, False, None)),
        ((1, 99, 7), 0.5, TokenComparison(1, True, False, 0.5)),
        ((1, 99, 7), 0.0625, TokenComparison(1, True, True, 0.0625)),
        ((1, 2, 99), None, TokenComparison(2, True, False, None)),
        ((1, 2), 0.0, TokenComparison(2, True, False, None)),
    ],
    ids=["same", "far from a tie", "near tie", "not among the likeliest", "cut short"],
)
def test_tokens_are_compared_up_to_the_first_difference(
    tokens: Sequence[int], gap: float | None, expected: TokenComparison
) -> None:
    assert compare_tokens(response(1, 2, 3, gap=gap), tokens, 0.0625) == expected


def request(length: int, first: int = 0) -> Request:
    """A prompt of so many tokens."""
    return Request((first, *range(1, length)), 3)


REFERENCE = {
    request(7): response(1, 2, 3, gap=0.06), request(8): response(1, 2, 3, gap=0.5), request(9): response(4, 5, 6),
}  # fmt: skip


def run_of(cached_tokens: int = 0, accepted_drafts: int = 0, **responses: tuple[int, ...]) -> EngineRun:
    """A run with a prefix cache; a response is named by its way and prompt length."""
    named = [
        (way, request(int(length)), tokens)
        for name, tokens in responses.items()
        for way, _, length in [name.partition("_")]
    ]
    requests = [request(length) for length in (7, 8, 9)]
    return EngineRun(requests, named, True, 4, cached_tokens, accepted_drafts)  # type: ignore[arg-type]


def test_wrong_responses_are_listed_by_way_and_near_ties_are_no_fault() -> None:
    run = run_of(
        cached_tokens=5, accepted_drafts=6,
        alone_7=(1, 99, 9), alone_8=(1, 99, 9), cached_8=(1, 2, 3), cached_9=(4, 5), session_8=(99,),
    )  # fmt: skip
    flags = {"speculative-config": DRAFTS}
    engine, items = compare_engine("with drafts", flags, run, REFERENCE, 0.1, 2.5)
    assert engine.wrong == {"alone": (8,), "cached": (9,), "session": (8,)}
    assert (engine.wrong_responses, engine.responses, engine.near_ties, engine.seconds) == (3, 5, 1, 2.5)
    assert (engine.draft_tokens, engine.cached_tokens, engine.accepted_drafts) == (3, 5, 6)
    assert (engine.sequences, engine.prefix_caching, engine.failure) == (4, True, None)
    assert [(item["way"], item["prompt_tokens"], item["same"]) for item in items] == [
        ("alone", 7, 1), ("alone", 8, 1), ("cached", 8, 3), ("cached", 9, 2), ("session", 8, 0),
    ]  # fmt: skip
    assert (items[1]["tokens"], items[1]["engine"]) == ((1, 99, 9), "with drafts")
    assert "tokens" not in items[2]


@pytest.mark.parametrize(
    ("run", "flags", "verdict"),
    [
        (run_of(1, 1, alone_7=(1, 2, 3)), {"speculative-config": DRAFTS}, Verdict.PASS),
        (run_of(1, 0, alone_7=(1, 2, 3)), {}, Verdict.PASS),
        (run_of(1, 0, alone_7=(1, 2, 3)), {"speculative-config": DRAFTS}, Verdict.INCONCLUSIVE),
        (run_of(0, 1, alone_7=(1, 2, 3)), {}, Verdict.INCONCLUSIVE),
        (run_of(0, 0, alone_9=(1, 2, 3)), {"speculative-config": DRAFTS}, Verdict.FAIL),
        ("alone: the process died (SIGSEGV)", {}, Verdict.FAIL),
    ],
    ids=["fine", "fine without drafts", "no draft accepted", "nothing cached", "wrong", "died"],
)
def test_an_engine_passes_where_what_it_has_was_tried_and_is_right(
    run: EngineRun | str, flags: dict[str, Any], verdict: Verdict
) -> None:
    engine, _ = compare_engine("served", flags, run, REFERENCE, 0.1, 1.0)
    assert engine.verdict == verdict
    assert engine.failure == (run if isinstance(run, str) else None)


CONFIG = "VLLM_MODEL=weights/v\nVLLM_MAX_MODEL_LEN=640\nVLLM_CPU_KVCACHE_SPACE=1\nVLLM_ENFORCE_EAGER=1\n"
SEVERAL = "VLLM_MAX_NUM_SEQS=8\n"
MTP = 'VLLM_SPECULATIVE_CONFIG=\'{"method": "mtp", "num_speculative_tokens": 2}\'\n'


@pytest.fixture
def one(add_variant: Callable[..., Path], tmp_path: Path) -> Callable[..., Variant]:
    """A variant of the embedded checkpoint with more lines, and settings p."""

    def make(*lines: str) -> Variant:
        add_variant("v", CONFIG + "".join(lines))
        (tmp_path / "weights").mkdir()
        (tmp_path / "weights" / "v").symlink_to(TINY)
        (tmp_path / "eval" / "gates").mkdir(parents=True)
        settings = SETTINGS.model_dump(exclude={"name"})
        (tmp_path / "eval" / "gates" / "p.yaml").write_text(json.dumps({"engine": settings}))
        return variant.load("v", tmp_path)

    return make


def test_the_neighbours_have_drafts_and_prefix_cache_the_other_way_and_several_requests_at_a_time(
    one: Callable[..., Variant],
) -> None:
    server = ServerCommand.resolve(one("VLLM_MAX_NUM_SEQS=1\n"))
    engines = list_engines(server, SETTINGS)
    assert list(engines) == ["served", "with drafts", "with prefix cache"]
    assert engines["served"] == server.flags
    drafting, caching = engines["with drafts"], engines["with prefix cache"]
    assert (drafting["max-num-seqs"], caching["max-num-seqs"]) == (4, 4)
    assert drafting["speculative-config"] == DRAFTS
    assert not drafting.get("enable-prefix-caching")
    assert caching["enable-prefix-caching"] is True
    assert "speculative-config" not in caching


def test_what_is_served_is_left_out_by_the_neighbours_and_the_reference(one: Callable[..., Variant]) -> None:
    server = ServerCommand.resolve(one(SEVERAL, MTP, "VLLM_ENABLE_PREFIX_CACHING=1\n"))
    sizes = {"cudagraph-capture-sizes": [3, 6], "compilation-config": {"mode": 3}, "enforce-eager": False}
    server = dataclasses.replace(server, flags={**server.flags, **sizes})
    engines = list_engines(server, SETTINGS)
    assert list(engines) == ["served", "without drafts", "without prefix cache"]
    assert engines["served"]["cudagraph-capture-sizes"] == [3, 6]
    assert "speculative-config" not in engines["without drafts"]
    assert engines["without drafts"]["enable-prefix-caching"]
    assert engines["without prefix cache"]["enable-prefix-caching"] is False
    assert engines["without prefix cache"]["speculative-config"]["num_speculative_tokens"] == 2
    for name in ("without drafts", "without prefix cache"):
        assert engines[name]["max-num-seqs"] == 8
        assert "cudagraph-capture-sizes" not in engines[name]
    plain = reference_flags(server)
    assert not plain.keys() & {"speculative-config", "compilation-config", "cudagraph-capture-sizes"}
    assert (plain["max-num-seqs"], plain["enforce-eager"], plain["enable-prefix-caching"]) == (1, True, False)
    assert plain["max-model-len"] == plain["max-num-batched-tokens"] == 640
    assert plain["model"] == server.flags["model"]


@pytest.fixture
def measure(
    one: Callable[..., Variant], monkeypatch: pytest.MonkeyPatch, stamps: None
) -> Callable[..., Engine]:
    """Measure a variant whose engines return these results for these lengths, the reference's last."""
    subject = one(SEVERAL, MTP)

    def measure(*results: Any, lengths: Sequence[Sequence[int] | None] | None = None) -> Engine:
        runs = Mock(side_effect=results)
        monkeypatch.setattr(EngineProcesses, "run", runs)
        path = measure_engine(subject, SETTINGS, Invocation(["check"]))
        assert [call.args[0] for call in runs.call_args_list] == [run_engine] * 3 + [run_reference]
        assert [call.args[1][2] for call in runs.call_args_list[:3]] == [
            ("alone", "cached", "together", "joining", "session"),
            ("together", "joining"),
            ("alone", "cached", "session"),
        ]  # fmt: skip
        assert [call.kwargs.get("is_served", False) for call in runs.call_args_list] == [
            True,
            False,
            False,
            False,
        ]
        *given, asked = [
            call.args[1][number] for call, number in zip(runs.call_args_list, (3, 3, 3, 1), strict=True)
        ]
        sent = [each and [len(one.prompt) for one in each] for each in (*given, asked)]
        assert lengths in (None, sent)
        record = store.read_record(path, Engine)
        items = store.read_items(path)
        assert [item["tokens"] for item in items[: len(results[-1][0])]] == [
            list(response.tokens) for response in results[-1][0]
        ]
        assert len(items) == len(results[-1][0]) + sum(engine.responses for engine in record.engines)
        return record

    return measure


FINE = run_of(1, 1, alone_7=(1, 2, 3), alone_8=(1, 2, 3))
NOISE = 0.03


def test_a_breakdown_is_a_finding_and_the_served_flags_decide(measure: Callable[..., Engine]) -> None:
    died = "alone: the process died (SIGSEGV)"
    record = measure(FINE, died, FINE, (list(REFERENCE.values()), NOISE))
    assert (record.verdict, record.outcome, record.served.name) == (Verdict.PASS, "pass", "served")
    assert [engine.verdict for engine in record.engines] == ["pass", "fail", "pass"]
    assert record.near_tie_nats == pytest.approx(0.09)
    (table,) = record.tables(Path("x"))
    assert f"Broke down, without drafts: {died}." in table.notes
    record = measure(died, FINE, FINE, (list(REFERENCE.values()), NOISE))
    assert record.verdict == Verdict.FAIL


def test_lengths_are_those_of_the_first_engine_that_runs(measure: Callable[..., Engine]) -> None:
    responses = (list(REFERENCE.values()), NOISE)
    measure("starting: died", FINE, FINE, responses, lengths=[None, None, [7, 8, 9], [7, 8, 9]])


def test_the_reference_engine_is_asked_once_what_several_engines_have_at_a_turn(
    measure: Callable[..., Engine],
) -> None:
    def with_turns(*firsts: int) -> EngineRun:
        turns = [("session", request(8, first), (1, 2, 3)) for first in firsts]
        return dataclasses.replace(FINE, responses=[*FINE.responses, *turns])

    responses = [*REFERENCE.values(), response(1, 2, 3), response(1, 99, 3), response(1, 2, 3)]
    lengths = [None, [7, 8, 9], [7, 8, 9], [7, 8, 9, 8, 8, 8]]
    record = measure(with_turns(4, 5), FINE, with_turns(4, 6), (responses, NOISE), lengths=lengths)
    assert [engine.wrong for engine in record.engines] == [{"session": (8,)}, {}, {}]


def test_where_every_engine_breaks_down_the_reference_shows_that_vllm_runs(
    measure: Callable[..., Engine],
) -> None:
    lengths = [None, None, None, list(SHORTEST)]
    record = measure(*["starting: died"] * 3, ([response(1)] * 16, NOISE), lengths=lengths)
    assert [engine.failure for engine in record.engines] == ["starting: died"] * 3
    with pytest.raises(
        EvalError, match=r"v: the reference engine failed \(starting: no memory\); read why in its log"
    ):
        measure("starting: died", FINE, FINE, "starting: no memory")


def test_an_interrupted_check_goes_on_with_the_engines_that_it_lacks(
    one: Callable[..., Variant], monkeypatch: pytest.MonkeyPatch, stamps: None
) -> None:
    """A breakdown is tried again: what caused it may be gone."""
    subject, reference = one(SEVERAL, MTP), (list(REFERENCE.values()), NOISE)
    runs = Mock(side_effect=[FINE, "starting: no memory", KeyboardInterrupt])
    monkeypatch.setattr(EngineProcesses, "run", runs)
    with pytest.raises(KeyboardInterrupt):
        measure_engine(subject, SETTINGS, Invocation(["check"]))
    runs.side_effect = [FINE, KeyboardInterrupt]
    with pytest.raises(KeyboardInterrupt):
        measure_engine(subject, SETTINGS, Invocation(["check"]))
    runs.side_effect = [FINE, reference]
    path = measure_engine(subject, SETTINGS, Invocation(["check"]))
    assert [call.args[2].removeprefix("engine ") for call in runs.call_args_list] == [
        *("served", "without drafts", "with prefix cache"),
        *("without drafts", "with prefix cache"),
        *("with prefix cache", "reference engine"),
    ]
    again = engine_record(subject, monkeypatch, FINE, FINE, FINE, reference)
    assert store.read_record(path, Engine).engines == again.engines
    assert not list((subject.root / ".cache" / "engine").iterdir())


def engine_record(subject: Variant, monkeypatch: pytest.MonkeyPatch, *results: Any) -> Engine:
    """The record of a check that nothing interrupts, without the time that it took."""
    monkeypatch.setattr(EngineProcesses, "run", Mock(side_effect=results))
    return store.read_record(measure_engine(subject, SETTINGS, Invocation(["check"])), Engine)


def test_wrong_prompt_lengths_are_named_below_the_table(measure: Callable[..., Engine]) -> None:
    requests = [request(length) for length in range(1, 16)]
    wrong = [("cached", each, (0,)) for each in requests]
    run = dataclasses.replace(FINE, requests=requests, responses=wrong)
    fine = dataclasses.replace(run, responses=[])
    record = measure(run, fine, fine, ([response(1)] * 15, NOISE))
    (table,) = record.tables(Path("x"))
    assert (
        "Wrong, served, cached: prompts of 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12 and 3 more tokens."
        in table.notes
    )
    assert table.rows[0][:7] == ("served", "fail", "2", "4", "15", "0", "15")


def test_a_variant_for_another_platform_is_refused(
    one: Callable[..., Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = one("PLATFORM=cuda\n")
    monkeypatch.setattr(host, "detect", lambda: "cpu")
    with pytest.raises(ServingError, match="v needs a GPU and there is none here; check it on a GPU host"):
        measure_engine(subject, SETTINGS, Invocation(["check"]))


@pytest.mark.engine
def test_the_embedded_model_responds_in_processes_as_the_plain_engine_does(
    one: Callable[..., Variant],
) -> None:
    heard: list[str] = []
    path = measure_engine(
        one(MTP, "VLLM_MAX_NUM_SEQS=1\nVLLM_DTYPE=bfloat16\n"),
        SETTINGS,
        Invocation(["check"], progress=lambda activity, *_: heard.append(activity)),
    )
    record = store.read_record(path, Engine)
    assert [engine.name for engine in record.engines] == ["served", "without drafts", "with prefix cache"]
    assert [engine.verdict for engine in record.engines] == ["pass"] * 3, record.tables(path)
    served, undrafted, caching = record.engines
    items = store.read_items(path)
    turns = [item for item in items if item.get("way") == "session"]
    burst = [item for item in items if item.get("way") == "burst"]
    assert {item["engine"] for item in turns} == {"with prefix cache"}
    # Only a neighbour has several requests at a time, so that a prompt can join another.
    assert served.responses == undrafted.responses - 1 == (caching.responses - len(turns + burst)) / 2
    assert len(turns) in (12, 16, 20)  # as many turns of four sessions as blocks fit the context
    assert len(burst) == 16
    assert {item["way"] for item in items if item["engine"] == "without drafts"} == {"together", "joining"}
    assert heard[0] == "engine served: starting"
    assert heard[-1] == "reference engine: rereading responses"
