"""The correctness matrix: what is compared, what a crash becomes, and the embedded model in real engines."""

import dataclasses
import json
import os
import shutil

import pytest
from safetensors.torch import load_file, save_file

from slimqwen import variant
from slimqwen.evaluation import engine_matrix, engine_scenarios
from slimqwen.evaluation.engine_matrix import Cell, Comparison, State
from slimqwen.evaluation.engine_scenarios import Answer, EngineMatrixError, Plan, Reply, Run
from slimqwen.evaluation.verdict import Verdict
from slimqwen.progress import silent
from slimqwen.records import store
from slimqwen.serving import launch, unsafe_engines
from slimqwen.serving.unsafe_engines import Modes
from tests.evaluation import engine_work

ROOT = variant.repository_root()
TINY = ROOT / "weights" / "tiny"
CONTEXT = 512
SERVED = Modes(
    draft_tokens=0,
    prefix_caching=False,
    kv_cache_dtype="auto",
    chunked_prefill=True,
    concurrency=1,
    graphs="eager",
)
FLAGS = {"max-num-batched-tokens": 256, "max-num-seqs": 1, "enforce-eager": True}
PLAN = {
    "text": "tinyworld",
    "seed": 5,
    "near_tie_nats": 0.1,
    "draft_tokens": 3,
    "concurrency": 4,
    "kv_cache_dtypes": ["auto", "fp8"],
    "crossed": [["draft_tokens", "prefix_caching"]],
    "prompt_tokens": [12, 40, 24, 30],
    "output_tokens": 8,
    "prefix": {"requests": 2, "tokens": 300},
    "mixed": {"requests": 6, "prompt_tokens": [4, 20], "output_tokens": [2, 6]},
    "timeout_s": 300,
}


def plan(**other):
    return Plan.model_validate({**PLAN, **other})


def answer(tokens, gap=None):
    """The plain engine's; `gap` is how much less likely token 99 is in every place."""
    likeliest = [{token: -1.0} | ({} if gap is None else {99: -1.0 - gap}) for token in tokens]
    return Answer(tuple(tokens), tuple(likeliest), 0)


@pytest.mark.parametrize(
    ("tokens", "gap", "expected"),
    [
        ((1, 2, 3), 0.5, Comparison(3, False, False, None)),
        ((1, 99, 7), 0.5, Comparison(1, True, False, 0.5)),
        ((1, 99, 7), 0.0625, Comparison(1, True, True, 0.0625)),
        ((1, 2, 99), None, Comparison(2, True, False, None)),
        ((1, 2), 0.0, Comparison(2, True, False, None)),
    ],
    ids=["same", "far from a tie", "near tie", "none of the likeliest", "cut short"],
)
def test_tokens_are_held_against_the_plain_engine_up_to_the_first_that_differs(tokens, gap, expected):
    assert engine_matrix.compare(answer((1, 2, 3), gap), tokens, 0.1) == expected


def cell(modes=SERVED, served=True, refusal=None):
    return Cell(modes, FLAGS, served, served, refusal)


def judged(*tokens):
    replies = [Reply("greedy", "prompts", number, each) for number, each in enumerate(tokens)]
    run = Run(replies, 0, 0, 0, None, 0, [])
    answers = {"prompts": [answer((1, 2, 3), 0.0625)] * len(tokens)}
    return engine_matrix.judge(cell(), run, answers, 0.1)


def test_near_ties_are_counted_and_are_fine():
    row, items = judged((1, 2, 3), (1, 99, 3))
    assert (row["state"], row["items"], row["near_ties"], row["tokens_compared"]) == (State.FINE, 2, 1, 4)
    assert [item["near_tie"] for item in items] == [False, True]


def test_a_token_that_differs_far_from_a_tie_is_unsafe_and_told():
    row, _ = judged((1, 2, 3), (1, 2, 5))
    assert row["state"] == State.UNSAFE
    assert row["reason"] == ("1 of 2 answers differ; first greedy, request 1, token 2 (beyond the likeliest)")


def test_a_breakdown_is_unsafe_and_a_refusal_is_not():
    broken, _ = engine_matrix.judge(cell(), "aborts: the process died (signal SIGSEGV)", {}, 0.1)
    refused, _ = engine_matrix.judge(cell(refusal="needs Triton"), None, {}, 0.1)
    assert (broken["state"], broken["reason"]) == (State.UNSAFE, "aborts: the process died (signal SIGSEGV)")
    assert (refused["state"], refused["reason"]) == (State.NOT_AVAILABLE, "needs Triton")


def cells(served=SERVED, platform="cpu", has_mtp=True, flags=FLAGS, **other):
    return engine_matrix.cells(plan(**other), served, flags, platform, CONTEXT, has_mtp=has_mtp)


def test_the_served_combination_comes_first_and_none_comes_twice():
    found = cells(crossed=[["draft_tokens", "graphs"], ["draft_tokens", "concurrency"]])
    assert [one.served for one in found] == [True] + [False] * 5
    assert found[0].modes == SERVED
    assert {(one.modes.draft_tokens, one.modes.graphs, one.modes.concurrency) for one in found} == {
        (0, "eager", 1), (0, "compiled", 1), (3, "eager", 1), (3, "compiled", 1), (0, "eager", 4), (3, "eager", 4),
    }  # fmt: skip


def test_all_modes_crossed_are_all_combinations_that_there_are():
    everything = [[*Modes.model_fields]]
    assert len(cells(crossed=everything)) == 2 * 2 * 2 * 2 * 2 * 2
    assert len(cells(crossed=everything, platform="cuda")) == 2 * 2 * 2 * 2 * 2 * 3


def test_a_variants_own_depth_and_concurrency_are_the_values_tried():
    served = SERVED.model_copy(update={"draft_tokens": 5, "concurrency": 8})
    found = cells(served, crossed=[["draft_tokens", "concurrency"]])
    assert [(one.modes.draft_tokens, one.modes.concurrency) for one in found] == [
        (5, 8),
        (0, 1),
        (0, 8),
        (5, 1),
    ]
    assert [one.mixed for one in found] == [True, False, False, False]


def test_mixed_requests_are_asked_several_at_a_time_even_where_one_at_a_time_is_served():
    found = cells(crossed=[["draft_tokens", "concurrency"]])
    assert [(one.modes.draft_tokens, one.modes.concurrency) for one in found if one.mixed] == [(0, 1), (0, 4)]


def test_what_a_cpu_lacks_is_not_available_there_and_is_tried_on_a_gpu():
    crossed = [["draft_tokens", "prefix_caching"]]
    refusals = {
        (one.modes.draft_tokens, one.modes.prefix_caching): one.refusal for one in cells(crossed=crossed)
    }
    assert "Triton" in refusals.pop((3, True))
    assert set(refusals.values()) == {None}
    assert {one.refusal for one in cells(crossed=crossed, platform="cuda")} == {None}


def test_a_checkpoint_without_an_mtp_head_has_no_combinations_with_mtp():
    found = cells(crossed=[["draft_tokens"]], has_mtp=False)
    assert [one.refusal for one in found] == [None, "the checkpoint has no MTP head"]


def test_flags_follow_from_modes_and_the_served_ones_stay_what_they_are():
    speculation = {"method": "mtp", "num_speculative_tokens": 2}
    sizes = [3, 6]
    flags = FLAGS | {
        "speculative-config": speculation,
        "cudagraph-capture-sizes": sizes,
        "enforce-eager": False,
    }
    served = SERVED.model_copy(update={"draft_tokens": 2, "graphs": "CUDA graphs"})
    everything = {
        one.modes: one.flags for one in cells(served, "cuda", flags=flags, crossed=[[*Modes.model_fields]])
    }
    assert {name: everything[served][name] for name in flags} == flags
    plain = everything[SERVED]
    assert "speculative-config" not in plain
    assert "cudagraph-capture-sizes" not in plain
    assert plain["enforce-eager"]
    whole = everything[served.model_copy(update={"chunked_prefill": False})]
    assert (whole["enable-chunked-prefill"], whole["max-num-batched-tokens"]) == (False, CONTEXT)
    compiled = everything[served.model_copy(update={"graphs": "compiled"})]
    assert compiled["compilation-config"] == {"cudagraph_mode": "NONE"}
    assert unsafe_engines.served_modes(compiled, "cuda")["graphs"] == "compiled"
    for modes, its_flags in everything.items():
        assert unsafe_engines.served_modes(its_flags, "cuda") == modes.model_dump()


def record(*rows):
    return {
        "cells": [
            {"served": served, "state": state, "modes": modes.model_dump()} for served, state, modes in rows
        ]
    }


@pytest.mark.parametrize(
    ("state", "said"),
    [("fine", Verdict.PASS), ("unsafe", Verdict.FAIL), ("not available", Verdict.INCONCLUSIVE)],
)
def test_the_verdict_is_that_of_the_combination_that_is_served(state, said):
    elsewhere = SERVED.model_copy(update={"prefix_caching": True})
    assert engine_matrix.verdict(record((True, state, SERVED), (False, "unsafe", elsewhere))) == said


def test_a_server_of_several_at_a_time_fails_by_what_is_unsafe_one_at_a_time():
    several = SERVED.model_copy(update={"concurrency": 4})
    assert engine_matrix.verdict(record((True, "fine", several), (False, "unsafe", SERVED))) == Verdict.FAIL
    assert engine_matrix.verdict(record((True, "fine", SERVED), (False, "unsafe", several))) == Verdict.PASS


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "does not exist"),
        ("{", "unusable"),
        (json.dumps(PLAN | {"crossed": [["wheels"]]}), "unusable"),
        (json.dumps(PLAN | {"near_tie_nats": 0}), "unusable"),
    ],
)
def test_a_plan_that_cannot_be_used_is_told_in_one_line(tmp_path, content, said):
    (tmp_path / "eval" / "engine").mkdir(parents=True)
    if content is not None:
        (tmp_path / "eval" / "engine" / "p.yaml").write_text(content)
    with pytest.raises(EngineMatrixError, match=said) as refused:
        engine_scenarios.load_plan("p", tmp_path)
    assert "\n" not in str(refused.value)


def requests(**other):
    sizes = {"context": CONTEXT, "budget": 256, "block": 128, "draft_tokens": 3, "concurrency": 4}
    return engine_scenarios.cut_requests(plan(), TINY, ROOT, **sizes | other)


def test_requests_have_the_plans_lengths_and_one_is_longer_than_the_token_budget():
    asked = requests(budget=100)
    assert [len(one.prompt) for one in asked["prompts"]] == [12, 40, 24, 30, 356]
    assert len({one.prompt[:300] for one in asked["prefixes"]}) == 1
    assert len({one.prompt for one in asked["prefixes"]}) == 2
    assert len(asked["growing"]) == 6
    assert all(len(one.prompt) < 128 < len(one.prompt) + one.output_tokens for one in asked["growing"])
    assert len(asked["mixed"]) == 6
    assert requests(budget=100) == asked
    assert len(requests(budget=500)["prompts"]) == 4


def test_prompts_that_do_not_fit_the_context_are_told():
    with pytest.raises(EngineMatrixError, match="do not fit into a context of 64"):
        requests(context=64)


def apart(function, task, tmp_path, timeout_s=60, heard=silent):
    return engine_matrix.apart(function, TINY, task, dict(os.environ), timeout_s, tmp_path / "log", heard)


def test_what_runs_apart_gives_its_result_and_tells_its_progress(tmp_path):
    told = []
    assert apart(engine_work.double, 21, tmp_path, heard=lambda *heard: told.append(heard)) == 42
    assert told == [("doubling", 1, 2)]


@pytest.mark.parametrize(
    ("function", "task", "said"),
    [
        (engine_work.raise_error, None, "greedy: RuntimeError: sizes do not match"),
        (engine_work.end_by_signal, "SIGSEGV", "aborts: the process died (signal SIGSEGV)"),
    ],
)
def test_a_breakdown_is_one_line_that_names_the_scenario(tmp_path, function, task, said):
    assert apart(function, task, tmp_path) == said


def test_an_engine_that_hangs_is_ended_and_told(tmp_path):
    assert apart(engine_work.hang, None, tmp_path, timeout_s=8) == "mixed: no end within 8 s"


@pytest.mark.parametrize(
    ("function", "task", "said"),
    [
        (engine_work.refuse, None, "prompts do not fit"),
        (engine_work.end_by_signal, "SIGKILL", "as when memory runs out"),
        (engine_work.end_before_it_begins, None, r"did not begin \(exit code 3\)"),
    ],
)
def test_what_is_no_fault_of_the_engine_is_an_error_and_no_finding(tmp_path, function, task, said):
    with pytest.raises(EngineMatrixError, match=said):
        apart(function, task, tmp_path)


@pytest.fixture
def repository(add_variant, tmp_path):
    """A repository with the embedded checkpoint as variant v, and a plan p."""

    def make(**other):
        add_variant(
            "v",
            "VLLM_MODEL=weights/v\nVLLM_MAX_MODEL_LEN=512\nVLLM_MAX_NUM_SEQS=1\nVLLM_MAX_NUM_BATCHED_TOKENS=256\n"
            "VLLM_ENABLE_PREFIX_CACHING=1\nVLLM_CPU_KVCACHE_SPACE=1\nVLLM_HOST=127.0.0.1\n"
            f"VLLM_PORT={launch.free_port()}\n",
        )
        shutil.copytree(TINY, tmp_path / "weights" / "v")
        (tmp_path / "eval" / "engine").mkdir(parents=True)
        (tmp_path / "eval" / "engine" / "p.yaml").write_text(json.dumps(PLAN | other))
        return variant.load("v", tmp_path)

    return make


def test_a_crash_blocks_serving_until_the_same_combination_is_fine_again(repository, monkeypatch):
    one = repository()
    served = SERVED.model_copy(update={"prefix_caching": True})
    reference = engine_matrix.Reference([cell(served)], {"prompts": []}, {"prompts": [answer((1, 2))]})
    fine = Run([Reply("greedy", "prompts", 0, (1, 2))], 0, 0, 0, None, 0, [])

    def found(cell_run):
        results = iter([reference, cell_run])
        monkeypatch.setattr(engine_matrix, "apart", lambda *_: next(results))
        monkeypatch.setattr(store, "_stamp", lambda: f"2026-01-01T00000{isinstance(cell_run, Run):d}Z")
        return store.read(engine_matrix.measure(one, "p", command=["check"]))

    monkeypatch.setattr(launch, "_check_memory", lambda command: None)
    command = launch.resolve(one)
    broken = found("greedy: the process died (signal SIGSEGV)")
    assert engine_matrix.verdict(broken) == Verdict.FAIL
    with pytest.raises(
        unsafe_engines.UnsafeEngineError, match=r"SIGSEGV.*experiments/v/engine_2026-01-01T000000Z"
    ):
        launch.check(command)
    assert engine_matrix.verdict(found(fine)) == Verdict.PASS
    launch.check(command)


def test_combinations_that_an_interrupted_run_has_tried_are_not_tried_again(repository, monkeypatch):
    one = repository()
    served = SERVED.model_copy(update={"prefix_caching": True})
    other = dataclasses.replace(cell(served.model_copy(update={"chunked_prefill": False})), served=False)
    cells = [cell(served), other]
    reference = engine_matrix.Reference(cells, {"prompts": []}, {"prompts": [answer((1, 2))]})
    fine = Run([Reply("greedy", "prompts", 0, (1, 2))], 0, 0, 0, None, 0, [])
    steps = iter([reference, fine, EngineMatrixError("killed"), reference, fine])

    def apart(*_):
        step = next(steps)
        if isinstance(step, Exception):
            raise step
        return step

    monkeypatch.setattr(engine_matrix, "apart", apart)
    with pytest.raises(EngineMatrixError, match="killed"):
        engine_matrix.measure(one, "p", command=["check"])
    path = engine_matrix.measure(one, "p", command=["check"])
    assert [row["state"] for row in store.read(path)["cells"]] == ["fine", "fine"]
    assert [item["cell"] for item in store.read_items(path)] == [0, 1, 2]
    assert next(steps, None) is None


def test_a_plain_engine_that_fails_is_an_error_and_no_finding(repository, monkeypatch):
    one = repository()
    monkeypatch.setattr(engine_matrix, "apart", lambda *_: "starting: RuntimeError: no memory")
    with pytest.raises(EngineMatrixError, match="plain engine fails"):
        engine_matrix.measure(one, "p", command=["check"])
    assert unsafe_engines.read(one.root) == []


@pytest.mark.engine
@pytest.mark.soak
def test_the_embedded_model_says_the_same_in_the_modes_that_it_is_served_in(repository):
    """Prefix caching on, one request at a time: two real engines, each in a process of its own."""
    told = []
    one = repository(crossed=[["chunked_prefill"], ["draft_tokens"]])
    path = engine_matrix.measure(one, "p", command=["check"], progress=lambda *heard: told.append(heard))
    found = store.read(path)
    served, whole, drafting = found["cells"]
    assert (served["state"], served["served"]) == ("fine", True), served["reason"]
    assert served["items"] == 4 + 2 * 2 + 4 + 6
    assert served["aborted"] == 2
    # Each of the two prompts has a whole block of 128 in common with the other; the first time, only the second hits.
    assert served["prefix_hits"] == 3 * 128
    assert whole["state"] == drafting["state"] == "not available"
    assert "Chunked prefill is required" in whole["reason"]
    assert "Triton" in drafting["reason"]
    assert engine_matrix.verdict(found) == Verdict.PASS
    assert unsafe_engines.read(one.root) == []
    assert told[-1][0].startswith("1/3 no MTP, prefix caching")
    items = store.read_items(path)
    assert [item["cell"] for item in items] == [0] * (4 + 2 + 6 + 6) + [1] * served["items"]


PLAIN = FLAGS | {"max-model-len": CONTEXT, "max-num-batched-tokens": CONTEXT, "dtype": "bfloat16"}


@pytest.fixture(scope="module")
def plainly():
    """What is asked, cut to the blocks of this machine's engine, and its answers."""
    with engine_scenarios.engine(TINY, PLAIN) as llm:
        asked = requests(block=engine_scenarios.block_tokens(llm))
        return asked, {
            group: [engine_scenarios.replay(llm, [one], log_probabilities=True)[0] for one in some]
            for group, some in asked.items()
        }


@pytest.fixture(scope="module")
def asked(plainly):
    return plainly[0]


@pytest.fixture(scope="module")
def plain_answers(plainly):
    return plainly[1]


@pytest.mark.engine
def test_cached_prefixes_preemption_aborts_and_arrivals_change_no_token(asked, plain_answers):
    modes = SERVED.model_copy(update={"concurrency": 4, "prefix_caching": True})
    flags = PLAIN | {"max-num-seqs": 4, "max-num-batched-tokens": 256, "enable-prefix-caching": True}
    run = engine_scenarios.play(TINY, TINY, (modes, flags, asked), silent)
    row, items = engine_matrix.judge(cell(modes), run, plain_answers, 0.1)
    assert row["state"] == State.FINE, row["reason"]
    assert {item["scenario"] for item in items} == {
        "greedy", "shared prefix", "shared prefix again", "aborts", "mixed", "together", "preemption",
    }  # fmt: skip
    assert row["preemptions"] > 0
    assert row["aborted"] == 2
    assert row["prefix_hits"] >= 2 * 128
    assert row["notes"] == []


@pytest.mark.engine
def test_another_models_tokens_are_unsafe(asked, plain_answers, tmp_path):
    """As an engine's would be that computes with damaged weights."""
    shutil.copytree(TINY, tmp_path / "damaged")
    tensors = load_file(TINY / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"].zero_()
    save_file(tensors, tmp_path / "damaged" / "model.safetensors", metadata={"format": "pt"})
    with engine_scenarios.engine(tmp_path / "damaged", PLAIN) as llm:
        said = engine_scenarios.replay(llm, asked["mixed"])
    replies = [Reply("mixed", "mixed", number, each.tokens) for number, each in enumerate(said)]
    row, _ = engine_matrix.judge(cell(), Run(replies, 0, 0, 0, None, 0, []), plain_answers, 0.1)
    assert row["state"] == State.UNSAFE
