"""The combinations of engine modes: which there are, and the flags that follow from them."""

from slimqwen.evals.engine import combinations
from slimqwen.serving import platform, unsafe_engines
from slimqwen.serving.unsafe_engines import Modes
from tests.evals.engine.examples import CONTEXT_LEN as CONTEXT
from tests.evals.engine.examples import FLAGS, SERVED, served_engine, settings


def combine(served=SERVED, platform="cpu", has_mtp=True, flags=FLAGS, **changes):
    engine = served_engine(flags, platform)
    return combinations.combine(settings(**changes), served, engine, has_mtp=has_mtp)


def test_the_served_combination_comes_first_and_none_comes_twice():
    result = combine(crossed=[["draft_tokens", "graphs"], ["draft_tokens", "concurrency"]])
    assert [each.served for each in result] == [True] + [False] * 5
    assert result[0].modes == SERVED
    assert {(each.modes.draft_tokens, each.modes.graphs, each.modes.concurrency) for each in result} == {
        (0, "eager", 1), (0, "compiled", 1), (3, "eager", 1), (3, "compiled", 1), (0, "eager", 4), (3, "eager", 4),
    }  # fmt: skip


def test_all_modes_crossed_are_all_combinations_that_there_are():
    everything = [[*Modes.model_fields]]
    assert len(combine(crossed=everything)) == 2 * 2 * 2 * 2 * 2 * 2
    assert len(combine(crossed=everything, platform="cuda")) == 2 * 2 * 2 * 2 * 2 * 3


def test_a_variants_own_depth_and_concurrency_are_crossed():
    served = SERVED.model_copy(update={"draft_tokens": 5, "concurrency": 8})
    result = combine(served, crossed=[["draft_tokens", "concurrency"]])
    depths_and_concurrencies = [(each.modes.draft_tokens, each.modes.concurrency) for each in result]
    assert depths_and_concurrencies == [(5, 8), (0, 1), (0, 8), (5, 1)]
    assert [each.mixed for each in result] == [True, False, False, False]


def test_mixed_requests_are_answered_concurrently_even_where_one_at_a_time_is_served():
    result = combine(crossed=[["draft_tokens", "concurrency"]])
    mixed = [each.modes for each in result if each.mixed]
    assert [(modes.draft_tokens, modes.concurrency) for modes in mixed] == [(0, 1), (0, 4)]


def test_what_a_cpu_lacks_is_refused_there_and_allowed_on_a_gpu(monkeypatch):
    monkeypatch.setattr(platform, "has_avx512", lambda: False)
    crossed = [["kv_cache_dtype"]]
    refusals = {each.modes.kv_cache_dtype: each.refusal for each in combine(crossed=crossed)}
    assert "AVX-512" in refusals.pop("fp8")
    assert set(refusals.values()) == {None}
    assert {each.refusal for each in combine(crossed=crossed, platform="cuda")} == {None}


def test_a_checkpoint_without_an_mtp_head_has_no_combinations_with_mtp():
    result = combine(crossed=[["draft_tokens"]], has_mtp=False)
    assert [each.refusal for each in result] == [None, "the checkpoint has no MTP head"]


def test_flags_follow_from_modes_and_the_served_ones_stay_what_they_are():
    flags = FLAGS | {
        "speculative-config": {"method": "mtp", "num_speculative_tokens": 2},
        "cudagraph-capture-sizes": [3, 6],
        "enforce-eager": False,
    }
    served = SERVED.model_copy(update={"draft_tokens": 2, "graphs": "CUDA graphs"})
    crossed = combine(served, "cuda", flags=flags, crossed=[[*Modes.model_fields]])
    everything = {each.modes: each.flags for each in crossed}
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
