"""Findings of unsafe engine modes: what they hold for, and what they say nothing about."""

import json

import pytest

from slimqwen import variant
from slimqwen.evals.engine.combinations import REFERENCE_MODES
from slimqwen.serving import unsafe_engines
from slimqwen.serving.errors import ServingError
from slimqwen.serving.unsafe_engines import Finding

TINY = variant.repository_root() / "weights" / "tiny"
SERVED = {
    "enable-prefix-caching": False,
    "enable-chunked-prefill": True,
    "max-num-seqs": 4,
    "enforce-eager": True,
}
MODES = REFERENCE_MODES.model_copy(update={"concurrency": 4})


def finding(modes=MODES, **other_build):
    here = unsafe_engines.build(TINY, "cpu").model_copy(update=other_build)
    return Finding(build=here, modes=modes, reason="3 answers differ", record="experiments/v/engine_x.json")


def write(root, *findings):
    unsafe_engines.update(root, findings[0].build, findings[0].record, unsafe=findings, fine=[])


def test_nothing_speaks_against_an_engine_of_which_nothing_was_found(tmp_path):
    assert unsafe_engines.find(tmp_path, TINY, SERVED, "cpu") is None


def test_the_same_modes_of_the_same_build_are_found(tmp_path):
    write(tmp_path, finding())
    assert unsafe_engines.find(tmp_path, TINY, SERVED, "cpu") == finding()


@pytest.mark.parametrize(
    "other",
    [
        {"platform": "cuda", "device": "8.6"},
        {"device": "another instruction set"},
        {"vllm": "0.1.0"},
        {"architecture": "LlamaForCausalLM"},
        {"quantization": "compressed-tensors"},
    ],
)
def test_a_finding_of_another_build_says_nothing(tmp_path, other):
    write(tmp_path, finding(**other))
    assert unsafe_engines.find(tmp_path, TINY, SERVED, "cpu") is None


@pytest.mark.parametrize(
    "change",
    [
        {"draft_tokens": 4},
        {"prefix_caching": True},
        {"kv_cache_dtype": "fp8"},
        {"chunked_prefill": False},
        {"graphs": "compiled"},
        {"concurrency": 5},
    ],
)
def test_a_finding_of_other_modes_says_nothing(tmp_path, change):
    write(tmp_path, finding(MODES.model_copy(update=change)))
    assert unsafe_engines.find(tmp_path, TINY, SERVED, "cpu") is None


def test_a_server_of_four_at_a_time_meets_what_was_found_at_fewer(tmp_path):
    write(tmp_path, finding(MODES.model_copy(update={"concurrency": 2})))
    assert unsafe_engines.find(tmp_path, TINY, SERVED, "cpu") is not None


@pytest.mark.parametrize("left_to_vllm", ["enable-prefix-caching", "enable-chunked-prefill", "max-num-seqs"])
def test_a_mode_that_is_left_to_vllm_may_be_either(tmp_path, left_to_vllm):
    write(tmp_path, finding())
    flags = {name: value for name, value in SERVED.items() if name != left_to_vllm}
    assert unsafe_engines.find(tmp_path, TINY, flags, "cpu") is not None


@pytest.mark.parametrize(
    ("flags", "platform", "graphs"),
    [
        ({"enforce-eager": True}, "cuda", "eager"),
        ({"enforce-eager": False}, "cpu", "compiled"),
        ({}, "cuda", "CUDA graphs"),
        ({"compilation-config": {"cudagraph_mode": "NONE"}}, "cuda", "compiled"),
    ],
)
def test_the_graph_mode_follows_from_flags_and_platform(flags, platform, graphs):
    assert unsafe_engines.served_modes(flags, platform)["graphs"] == graphs


def test_the_draft_depth_is_that_of_the_speculative_config():
    flags = {"speculative-config": {"method": "mtp", "num_speculative_tokens": 3}}
    assert unsafe_engines.served_modes(flags, "cuda")["draft_tokens"] == 3


def test_what_is_fine_again_is_taken_out_and_nothing_else(tmp_path):
    deep = finding(MODES.model_copy(update={"draft_tokens": 4}))
    of_a_gpu = finding(platform="cuda", device="8.6")
    write(tmp_path, of_a_gpu)
    write(tmp_path, finding(), deep)
    unsafe_engines.update(tmp_path, deep.build, "experiments/v/engine_y.json", unsafe=[], fine=[MODES])
    left = unsafe_engines.read(tmp_path)
    assert of_a_gpu in left
    assert deep in left
    assert len(left) == 2


def test_what_is_fine_for_one_variant_stays_unsafe_for_another(tmp_path):
    write(tmp_path, finding())
    unsafe_engines.update(tmp_path, finding().build, "experiments/w/engine_y.json", unsafe=[], fine=[MODES])
    assert unsafe_engines.read(tmp_path) == [finding()]


def test_a_finding_made_again_replaces_the_one_before(tmp_path):
    write(tmp_path, finding())
    again = finding().model_copy(update={"reason": "it crashed"})
    write(tmp_path, again)
    assert unsafe_engines.read(tmp_path) == [again]


@pytest.mark.parametrize("content", ["{", "{}", json.dumps({"findings": [{"reason": "?"}]})])
def test_an_unreadable_file_is_told_in_one_line_and_not_taken_for_empty(tmp_path, content):
    (tmp_path / "eval").mkdir()
    (tmp_path / unsafe_engines.FILE).write_text(content)
    with pytest.raises(ServingError, match=r"eval/unsafe_engines\.json: .*git checkout"):
        unsafe_engines.find(tmp_path, TINY, SERVED, "cpu")


def test_the_committed_file_can_be_read():
    unsafe_engines.read(variant.repository_root())
