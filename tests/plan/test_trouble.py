"""Known trouble: conditions on the facts of a plan."""

import json

import pytest

from slimqwen import variant
from slimqwen.plan import trouble
from slimqwen.records.settings import SettingsError
from slimqwen.vllm_plugin.patches.table import PATCHES
from tests.plan.example import plan

ROOT = variant.repository_root()
KNOWN = trouble.read_known_trouble(ROOT)
ENTRY = "- {{name: x, vllm: {vllm}, when: {when}, effect: dies, description: d, instead: i, evidence: e}}\n"
NO_KERNEL = (
    "ValueError: Failed to find a kernel that can implement the WNA16 linear layer. Reasons: CutlassW4A8"
)
NO_CUBINS = "fp8 tensor core is not supported in fa2 backend"
NO_BACKEND = (
    "ValueError: No valid attention backend found for NVIDIA A10G with AttentionSelectorConfig(head_size=192"
)
NO_FP8_BACKEND = (
    "ValueError: FP8 KV cache is not supported by the Triton attention backend on NVIDIA A10G (compute"
)


def names(plan, effect):
    return [entry.name for entry in trouble.match_trouble(plan, KNOWN) if entry.effect == effect]


def test_a_plan_that_follows_every_cure_is_free_of_trouble():
    assert {entry.effect for entry in trouble.match_trouble(plan(), KNOWN)} == {"mended"}


@pytest.mark.parametrize(
    ("changes", "killing"),
    [
        (
            {"backend": "FLASHINFER", "kv_cache_dtype": "fp8", "full": (), "compiler": False},
            "flashinfer-without-compiler",
        ),
        ({"prefill": "flashinfer", "compiler": False}, "gdn-prefill-without-compiler"),
        ({"flashinfer_sampler": True, "compiler": False}, "sampling-without-compiler"),
        (
            {"failed_at": "KV cache", "error": "ValueError: To serve at least one request"},
            "request-does-not-fit",
        ),
        ({"failed_at": "model", "error": "AssertionError"}, "refused-by-vllm"),
        (
            {"failed_at": "libraries of FlashInfer", "error": f"AssertionError: {NO_CUBINS}"},
            "fp8-queries-without-cubins",
        ),
        ({"failed_at": "model", "error": NO_KERNEL}, "no-linear-kernel"),
        ({"failed_at": "model", "error": NO_BACKEND}, "no-attention-backend"),
        ({"failed_at": "model", "error": NO_FP8_BACKEND}, "no-attention-backend"),
    ],
)
def test_what_kills_a_server_is_named(changes, killing):
    assert names(plan(**changes), "dies") == [killing]


@pytest.mark.parametrize(
    ("changes", "costing"),
    [
        ({"backend": "FLASHINFER", "kv_cache_dtype": "fp8", "full": ()}, "fp8-kv-loses-full-graphs"),
        ({"prefix_caching": True, "shortest_hit": 1000}, "prefix-cache-beside-mtp"),
        ({"drafts": 0, "prefix_caching": True, "shortest_hit": 1089}, "prefix-hits-out-of-reach"),
        ({"dtype": "float16"}, "float16-slow-decode"),
        ({"state_dtype": "float16"}, "float16-states-slow-decode"),
        ({"sizes": (8, 16), "full": (40,)}, "graphs-not-multiples"),
        ({"full": (5, 10, 15)}, "verify-steps-without-graphs"),
        ({"schedule": [[1, 4, 4], [5, 8, 2]]}, "draft-depth-by-load"),
    ],
)
def test_what_costs_is_named_and_kills_nothing(changes, costing):
    changed = plan(**changes)
    assert names(changed, "dies") == []
    assert costing in names(changed, "costs")


FP8_BELOW, FP8_IN_TRITON = "fp8-kv-below-8.0", "fp8-kv-in-triton-attention"


@pytest.mark.parametrize(
    ("capability", "backend", "killing"),
    [
        ("7.5", None, [FP8_BELOW]),
        ("7.5", "TRITON_ATTN", [FP8_BELOW]),
        ("8.0", None, []),
        ("8.0", "TRITON_ATTN", [FP8_IN_TRITON]),
        ("8.6", None, []),
        ("8.6", "triton_attn", [FP8_IN_TRITON]),
        ("8.7", "TRITON_ATTN", [FP8_IN_TRITON]),
        ("8.9", "TRITON_ATTN", []),
        ("9.0", None, []),
        (None, "TRITON_ATTN", []),
    ],
)
def test_an_fp8_kv_cache_needs_a_backend_of_the_card(capability, backend, killing):
    """By the facts of an engine, and by flags alone, as before a start without a plan."""
    flags = {"kv-cache-dtype": '"fp8"', "attention-backend": json.dumps(backend), "dtype": '"float16"'}
    planned = plan(kv_cache_dtype="fp8", dtype="float16", capability=capability).model_copy(
        update={"flags": flags}
    )
    for each in (planned, planned.model_copy(update={"engine": None, "attention": []})):
        assert names(each, "dies") == killing
        assert names(each.model_copy(update={"flags": flags | {"kv-cache-dtype": "null"}}), "dies") == (
            killing if each.engine else []
        )


@pytest.mark.parametrize(
    ("capability", "dtype", "killing"),
    [("7.5", "bfloat16", ["bfloat16-below-8.0"]), ("7.5", "float16", []), ("8.0", "bfloat16", [])],
)
def test_bfloat16_needs_capability_8(capability, dtype, killing):
    planned = plan(dtype=dtype, capability=capability).model_copy(update={"flags": {"dtype": f'"{dtype}"'}})
    for each in (planned, planned.model_copy(update={"engine": None, "attention": []})):
        assert names(each, "dies") == killing


PREFIX_CACHE = {"prefix_caching": True, "shortest_hit": 545}
FLASHINFER_FP8 = {"backend": "FLASHINFER", "kv_cache_dtype": "fp8", "full": ()}


@pytest.mark.parametrize(
    ("changes", "unmet"),
    [
        (PREFIX_CACHE | {"method": "ngram"}, "prefix-cache-beside-mtp"),
        (PREFIX_CACHE | {"prefill": ""}, "prefix-cache-beside-mtp"),
        (FLASHINFER_FP8 | {"method": "ngram"}, "flashinfer-fp8-mtp-memory"),
        ({"dtype": "float16", "capability": "7.5"}, "float16-slow-decode"),
        ({"dtype": "float16", "prefill": ""}, "float16-slow-decode"),
    ],
)
def test_trouble_of_one_method_layer_or_card_is_not_that_of_others(changes, unmet):
    needed = {"method": "mtp", "prefill": "triton", "capability": "8.6"}
    assert unmet not in names(plan(**changes), "costs")
    assert unmet in names(plan(**changes | {key: needed[key] for key in needed.keys() & changes}), "costs")


def test_every_name_of_an_mtp_head_is_mtp():
    assert names(plan(**PREFIX_CACHE, method="qwen3_5_mtp"), "costs") == ["prefix-cache-beside-mtp"]


def test_what_a_patch_mends_is_said_and_prevents_no_start():
    """Only states that drafts may spoil, of a server that can pad a prompt beside another."""
    (entry,) = (entry for entry in KNOWN if entry.effect == "mended")
    assert "patch padded_prompts" in entry.instead
    assert PATCHES["padded_prompts"].devices == ("cpu", "cuda")
    assert entry.applies_to(plan())
    assert not entry.prevents_start
    for free in ({"drafts": 0}, {"prefill": ""}, {"schedule": [[1, 8, 4]]}):
        assert not entry.applies_to(plan(**free))


def test_graphs_of_every_depth_of_a_schedule_are_multiples():
    by_load = {"schedule": [[1, 4, 4], [5, 8, 2]], "full": (5, 10, 15, 20, 40)}
    assert "graphs-not-multiples" not in names(plan(sizes=(5, 10, 15, 18, 20, 21, 24), **by_load), "costs")
    assert "graphs-not-multiples" in names(plan(sizes=(5, 8), **by_load), "costs")


def test_a_flag_is_a_condition_too():
    flags = {"kv-cache-dtype": '"fp8"', "enforce-eager": "true"}
    served = plan(gpu="cpu").model_copy(update={"flags": flags})
    assert names(served, "differs") == ["fp8-kv-eager-on-cpu"]
    for changes in ({"kv-cache-dtype": '"auto"'}, {"enforce-eager": "false"}):
        assert names(served.model_copy(update={"flags": flags | changes}), "differs") == []
    assert names(plan(gpu="a10g").model_copy(update={"flags": flags}), "differs") == []
    (trouble_met,) = trouble.match_trouble(served, KNOWN)[:1]
    assert trouble_met.prevents_start


def test_trouble_of_other_versions_is_not_met():
    assert names(plan(dtype="float16", vllm="0.34.0"), "costs") == []
    assert names(plan(dtype="float16", vllm="0.32.0+cpu"), "costs") == ["float16-slow-decode"]


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("- name: x\n- {}\n", r"yaml:2: name is missing; add it"),
        (ENTRY.format(vllm="nonsense", when="{gpu: a10g}"), "not a version range"),
        (ENTRY.format(vllm="'>1'", when="{gpus: a10g}"), "unknown facts gpus; name some of .*gpu"),
        (ENTRY.format(vllm="'>1'", when="{}"), "no condition; name some of"),
    ],
)
def test_a_damaged_list_is_one_line(tmp_path, entry, reason):
    (tmp_path / "eval").mkdir()
    (tmp_path / trouble.FILE).write_text(entry)
    with pytest.raises(SettingsError, match=reason):
        trouble.read_known_trouble(tmp_path)


def test_every_entry_says_what_to_do_and_how_it_is_known():
    assert all(entry.instead and entry.evidence and entry.description for entry in KNOWN)
    assert len({entry.name for entry in KNOWN}) == len(KNOWN)
