"""Engine modes: how answers are compared, what a crash becomes, and the embedded model in real engines."""

import json
import shutil
from unittest.mock import Mock

import pytest
from safetensors.torch import load_file, save_file

from slimqwen import variant
from slimqwen.evals import EvalError
from slimqwen.evals.engine import modes as engine_modes
from slimqwen.evals.engine import scenarios
from slimqwen.evals.engine.combinations import Reference
from slimqwen.evals.engine.isolation import Engines
from slimqwen.evals.engine.modes import Cell, Comparison, EngineModes, State
from slimqwen.evals.engine.scenarios import Reply, Run, TieNoise
from slimqwen.progress import silent
from slimqwen.records import store
from slimqwen.serving import checks, in_process, unsafe_engines
from slimqwen.serving.command import ServerCommand
from slimqwen.serving.errors import ServingError
from slimqwen.serving.server import free_port
from slimqwen.stats.verdict import Verdict
from tests.evals.engine.examples import CONTEXT_LEN, FLAGS, SERVED, SETTINGS, TINY, answer, combination
from tests.evals.engine.test_scenarios import requests
from tests.noise import NOISE_FACTOR


@pytest.mark.parametrize(
    ("tokens", "gap", "expected"),
    [
        ((1, 2, 3), 0.5, Comparison(3, False, False, None)),
        ((1, 99, 7), 0.5, Comparison(1, True, False, 0.5)),
        ((1, 99, 7), 0.0625, Comparison(1, True, True, 0.0625)),
        ((1, 2, 99), None, Comparison(2, True, False, None)),
        ((1, 2), 0.0, Comparison(2, True, False, None)),
    ],
    ids=["same", "far from a tie", "near tie", "not among the likeliest", "cut short"],
)
def test_tokens_are_compared_up_to_the_first_difference(tokens, gap, expected):
    assert engine_modes.compare(answer((1, 2, 3), gap), tokens, 0.1) == expected


def judge(run, refusal=None):
    answers = {"prompts": [answer((1, 2, 3), 0.0625)] * 2}
    return engine_modes.judge(combination(refusal=refusal), run, answers, 0.1, seconds=1.0)


def run_of(*tokens, group="prompts"):
    replies = [Reply("greedy", group, number, each) for number, each in enumerate(tokens)]
    return Run(replies, 0, 0, 0, None, 0, [])


def test_near_ties_are_counted_and_are_fine():
    cell, items = judge(run_of((1, 2, 3), (1, 99, 3)))
    assert (cell.state, cell.items, cell.near_ties, cell.tokens_compared) == (State.FINE, 2, 1, 4)
    assert [item["near_tie"] for item in items] == [False, True]


@pytest.mark.parametrize(
    ("run", "refusal", "state", "reason"),
    [
        (
            run_of((1, 2, 3), (1, 2, 5)),
            None,
            State.UNSAFE,
            "1 of 2 answers differ; first greedy, request 1, token 2 (not among the likeliest)",
        ),
        ("aborts: it died", None, State.UNSAFE, "aborts: it died"),
        (None, "needs AVX-512", State.NOT_AVAILABLE, "needs AVX-512"),
    ],
    ids=["another token", "crash", "refusal"],
)
def test_the_state_has_a_reason(run, refusal, state, reason):
    cell, _ = judge(run, refusal)
    assert (cell.state, cell.reason) == (state, reason)


def cell(served, state, modes):
    return Cell.model_construct(modes=modes, served=served, state=state)


SEVERAL = SERVED.model_copy(update={"concurrency": 4})
CACHING = SERVED.model_copy(update={"prefix_caching": True})


@pytest.mark.parametrize(
    ("served", "other", "verdict"),
    [
        ((State.FINE, SERVED), (State.UNSAFE, CACHING), Verdict.PASS),
        ((State.UNSAFE, SERVED), (State.UNSAFE, CACHING), Verdict.FAIL),
        ((State.NOT_AVAILABLE, SERVED), (State.UNSAFE, CACHING), Verdict.INCONCLUSIVE),
        ((State.FINE, SEVERAL), (State.UNSAFE, SERVED), Verdict.FAIL),
        ((State.FINE, SERVED), (State.UNSAFE, SEVERAL), Verdict.PASS),
    ],
)
def test_the_verdict_is_that_of_the_served_modes_also_with_fewer_concurrent_requests(served, other, verdict):
    cells = (cell(True, *served), cell(False, *other))
    assert EngineModes.model_construct(cells=cells).verdict == verdict


@pytest.fixture
def repository(add_variant, tmp_path):
    """A repository with the embedded checkpoint as variant v, and settings p."""

    def make(**changes):
        add_variant(
            "v",
            "VLLM_MODEL=weights/v\nVLLM_MAX_MODEL_LEN=512\nVLLM_MAX_NUM_SEQS=1\nVLLM_MAX_NUM_BATCHED_TOKENS=256\n"
            "VLLM_ENABLE_PREFIX_CACHING=1\nVLLM_CPU_KVCACHE_SPACE=1\nVLLM_HOST=127.0.0.1\n"
            f"VLLM_PORT={free_port()}\n",
        )
        shutil.copytree(TINY, tmp_path / "weights" / "v")
        (tmp_path / "eval" / "gates").mkdir(parents=True)
        (tmp_path / "eval" / "gates" / "p.yaml").write_text(json.dumps({"engine": SETTINGS | changes}))
        return variant.load("v", tmp_path)

    return make


@pytest.fixture
def measure(repository, monkeypatch):
    """Measure a variant whose engines return these results, one after the other; an exception is raised."""
    one = repository()

    def run(*results):
        engine_runs = Mock(side_effect=results)
        monkeypatch.setattr(Engines, "run", engine_runs)
        path = engine_modes.measure(one, "p", command=["check"])
        assert engine_runs.call_count == len(results)
        return path

    run.variant = one
    return run


def reference_of(*cells):
    return Reference(list(cells), {"prompts": []}, {"prompts": [answer((1, 2))]}, TieNoise(0.03, 100))


FINE = run_of((1, 2))


@pytest.mark.usefixtures("stamps")
def test_a_crash_blocks_serving_until_the_same_combination_is_fine_again(measure, monkeypatch):
    reference = reference_of(combination(CACHING))
    monkeypatch.setattr(checks, "_check_memory", lambda command: None)
    command = ServerCommand.resolve(measure.variant)
    broken = measure(reference, "greedy: the process died (SIGSEGV)")
    assert store.read_record(broken).verdict == Verdict.FAIL
    with pytest.raises(ServingError, match=rf"SIGSEGV.*experiments/v/{broken.stem}"):
        checks.check_command(command)
    assert store.read_record(measure(reference, FINE)).verdict == Verdict.PASS
    checks.check_command(command)


def test_combinations_that_an_interrupted_run_has_tried_are_not_tried_again(measure):
    other = combination(CACHING.model_copy(update={"chunked_prefill": False}), served=False)
    reference = reference_of(combination(CACHING), other)
    with pytest.raises(EvalError, match="killed"):
        measure(reference, FINE, EvalError("killed"))
    path = measure(reference, FINE)
    assert [cell.state for cell in store.read_record(path).cells] == ["fine", "fine"]
    assert [item["cell"] for item in store.read_items(path)] == [0, 1, 2]


def test_a_reference_engine_that_fails_is_an_error_and_no_finding(measure):
    with pytest.raises(EvalError, match="reference engine fails"):
        measure("starting: RuntimeError: no memory")
    assert unsafe_engines.read(measure.variant.root) == []


@pytest.mark.engine
@pytest.mark.soak
def test_the_embedded_model_says_the_same_in_the_modes_that_it_is_served_in(repository):
    """Prefix caching on, one request at a time: two real engines, each in a process of its own."""
    messages = []
    one = repository(crossed=[["chunked_prefill"], ["draft_tokens"]])
    path = engine_modes.measure(one, "p", command=["check"], progress=lambda *heard: messages.append(heard))
    result = store.read_record(path, EngineModes)
    served, whole, drafting = result.cells
    assert (served.state, served.served) == ("fine", True), served.reason
    assert served.items == 4 + 2 * 2 + 4 + 6
    assert served.aborted == 2
    # The two prompts share one block, whose size the CPU decides; the very first does not hit.
    assert served.prefix_hits > 0
    assert served.prefix_hits % 3 == 0
    assert (whole.state, drafting.state) == ("not available", "fine"), drafting.reason
    assert "Chunked prefill is required" in whole.reason
    assert result.verdict == Verdict.PASS
    assert unsafe_engines.read(one.root) == []
    assert messages[-1][0].startswith("3/3 MTP K=3, prefix caching")
    items = store.read_items(path)
    numbers = [0] * (4 + 2 + 6 + 6) + [1] * served.items + [3] * drafting.items
    assert [item["cell"] for item in items] == numbers


PLAIN = FLAGS | {"max-model-len": CONTEXT_LEN, "max-num-batched-tokens": CONTEXT_LEN, "dtype": "bfloat16"}


@pytest.fixture(scope="module")
def reference():
    """Requests by group, cut to the blocks of this machine's engine, its answers to each alone, and what ties there."""
    with in_process.served_engine(TINY, PLAIN) as llm:
        requests_by_group = requests(block_size=scenarios.cache_block_size(llm))
        answers = scenarios.answer_singly(llm, requests_by_group, silent)
        noise = scenarios.measure_tie_noise(llm, requests_by_group, answers, silent)
        return requests_by_group, answers, noise.near_tie_nats(NOISE_FACTOR)


@pytest.mark.engine
def test_cached_prefixes_preemption_aborts_and_arrivals_change_no_token(reference):
    requests_by_group, reference_answers, tie_nats = reference
    modes = SERVED.model_copy(update={"concurrency": 4, "prefix_caching": True})
    flags = PLAIN | {"max-num-seqs": 4, "max-num-batched-tokens": 256, "enable-prefix-caching": True}
    run = scenarios.play(TINY, TINY, (modes, flags, requests_by_group), silent)
    row, items = engine_modes.judge(combination(modes), run, reference_answers, tie_nats, seconds=1.0)
    assert row.state == State.FINE, row.reason
    assert {item["scenario"] for item in items} == {
        "greedy", "shared prefix", "shared prefix again", "aborts", "mixed", "together", "preemption",
    }  # fmt: skip
    assert row.preemptions > 0
    assert row.aborted == 2
    assert row.prefix_hits >= 2 * 128
    assert row.notes == ()


@pytest.mark.engine
def test_another_models_tokens_are_unsafe(reference, tmp_path):
    """As an engine's would be that computes with damaged weights."""
    requests_by_group, reference_answers, tie_nats = reference
    shutil.copytree(TINY, tmp_path / "damaged")
    tensors = load_file(TINY / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"].zero_()
    save_file(tensors, tmp_path / "damaged" / "model.safetensors", metadata={"format": "pt"})
    with in_process.served_engine(tmp_path / "damaged", PLAIN) as llm:
        said = scenarios.replay(llm, requests_by_group["mixed"])
    run = run_of(*(each.tokens for each in said), group="mixed")
    row, _ = engine_modes.judge(combination(), run, reference_answers, tie_nats, seconds=1.0)
    assert row.state == State.UNSAFE
