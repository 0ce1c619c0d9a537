"""The changes of settings that are tried, and what is known against them before a server starts."""

from collections.abc import Callable
from pathlib import Path

import pytest

from slimqwen import variant
from slimqwen.bench.workload import Workload
from slimqwen.plan.facts import KvCache, LinearKernels
from slimqwen.progress import silent
from slimqwen.search.tune.arms import Arm
from slimqwen.search.tune.changes import ROWS, figures_of, list_changes
from slimqwen.search.tune.preparation import prepare_arms
from slimqwen.search.tune.subject import TuneSubject
from slimqwen.variant import Variant
from tests.evals.gate_checks import link_settings
from tests.plan import example
from tests.search.tune.turns import K2
from tests.zoo.published_forms import PUBLISHED_FORMS

ROOT = Path(__file__).parents[3]
BY_NAME = {row.name: row for row in ROWS}


def test_values_are_figures_of_the_plan_without_the_change() -> None:
    cache = KvCache(
        available_bytes=10**9,
        block_size=16,
        blocks=9,
        tokens=99,
        sequences_at_max_model_len=1,
        shortest_prompt_with_hit=None,
    )
    figures = figures_of(example.plan(drafts=1).model_copy(update={"kv_cache": cache}))
    found = {each.name: each.lines for each in list_changes(figures, rounding=False, sampling=False)}
    assert found["half the token budget"] == {"VLLM_MAX_NUM_BATCHED_TOKENS": "1024"}
    assert found["a graph for each batch"] == {"VLLM_CUDAGRAPH_CAPTURE_SIZES": "2,4,6,8,10,12,14,16"}
    assert found["pinned KV pool"] == {"VLLM_KV_CACHE_MEMORY_BYTES": "1000000000"}
    assert "prefix cache" in found
    assert "no prefix cache" not in found


def test_without_a_plan_no_value_is_made_up() -> None:
    found = {each.name for each in list_changes({}, rounding=True, sampling=True)}
    assert found == BY_NAME.keys() - {
        "prefix cache", "no prefix cache", "half the token budget", "twice the token budget", "pinned KV pool",
        "a graph for each batch",
    }  # fmt: skip


def test_what_rounds_otherwise_and_what_only_sampled_requests_use_is_tried_on_request() -> None:
    figures = figures_of(example.plan())
    exact, lossy, sampled = (
        {each.name for each in list_changes(figures, rounding=rounding, sampling=sampling)}
        for rounding, sampling in ((False, False), (True, False), (False, True))
    )
    assert lossy - exact == {"FP8 KV", "int8 KV", "bfloat16 states", "float16 states", "int8 activations"}
    assert sampled - exact == {"probabilistic drafts", "block verification"}


@pytest.mark.parametrize(
    ("form", "kernel", "reason"),
    [
        ("w4a16", "MarlinLinearKernel", ""),
        ("w4a16", "HummingLinearKernel", "not here: linear_kernels is not MarlinLinearKernel"),
        ("w8a16", "MarlinLinearKernel", "as it is packed"),
        ("w4a16-zero-points", "MarlinLinearKernel", "as it is packed"),
    ],
)
def test_int8_activations_need_marlin_and_4_bit_symmetric_groups_alone(
    tmp_path: Path, form: str, kernel: str, reason: str
) -> None:
    weights = PUBLISHED_FORMS[form].build(tmp_path / form)
    plan = example.plan().model_copy(update={"linears": [LinearKernels(kernel=kernel, layers={"mlp": 1})]})
    found = BY_NAME["int8 activations"].find_obstacle(plan, weights)
    assert reason in found
    assert bool(reason) == bool(found)


@pytest.fixture
def subject(add_variant: Callable[..., Path], tmp_path: Path) -> TuneSubject:
    """The embedded model, served four at a time."""
    lines = (ROOT / "experiments" / "tiny" / "config.env").read_text().replace("SEQS=1", "SEQS=4")
    add_variant("v", lines)
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "tiny").symlink_to(ROOT / "weights" / "tiny")
    link_settings(tmp_path)
    one: Variant = variant.load("v", tmp_path)
    return TuneSubject.of_variant(one, Workload.load("classes", tmp_path), [1, 4], None, sessions=True)


@pytest.mark.engine
def test_vllms_parser_and_the_plan_say_what_this_cpu_has(subject: TuneSubject, tmp_path: Path) -> None:
    plain = Arm(K2.drafts)
    suffix = Arm({"method": "suffix", "num_speculative_tokens": 8})
    figures = figures_of(example.plan(drafts=2))
    arms = [
        plain,
        *(Arm(K2.drafts, (each,)) for each in list_changes(figures, rounding=True, sampling=True)),
        suffix,
    ]
    refused, planned = prepare_arms(subject, arms, tmp_path / "plan.log", silent)
    reasons = {name.removeprefix("MTP K=2, "): reason for name, reason in refused.items()}
    assert "Arctic Inference is required" in reasons.pop("suffix K=8")
    nothing = "it changes nothing on this device"
    for name in ("pinned KV pool", "a graph for each batch", "Triton attention", "FlashInfer attention"):
        assert reasons.pop(name) == nothing
    assert "adaptive draft verification" in reasons.pop("adaptive verification")
    assert reasons.pop("block verification") == "not here: model_runner is not V2"
    assert reasons.pop("int8 activations").startswith("not here: linear_kernels")
    assert int(planned["MTP K=2"]["half_budget"]) == 1024
    assert {"prefix cache", "half the token budget", "bfloat16 states"}.isdisjoint(reasons)
