"""Servers on GPUs by arithmetic: against vLLM's own layout in recorded plans, and against figures by hand."""

from dataclasses import replace

import pytest

from slimqwen import variant
from slimqwen.fit.memory import (
    Fit,
    FitError,
    ServerSettings,
    estimate_activations,
    fit_checkpoint,
    size_checkpoint,
)
from slimqwen.fit.optimised import list_optimised
from slimqwen.fit.subject import Subject, find_subject
from slimqwen.fit.verdict import fit_on_gpus, give_verdict
from slimqwen.plan.devices import read_gpus
from slimqwen.plan.record import list_recorded_plans
from slimqwen.plan.resolution import OVERHEAD_GIB

ROOT = variant.repository_root()
GPUS = read_gpus(ROOT)
PLANNED = [name for name in variant.names(ROOT) if list_recorded_plans(ROOT, name)]


def fitted(model: str, gpu: str, **changes: object) -> tuple[Subject, ServerSettings, list[Fit]]:
    subject = find_subject(model, ROOT)
    settings = replace(ServerSettings.of(subject, None, None), **changes)
    return subject, settings, fit_on_gpus(subject, settings, [GPUS[gpu]])[gpu]


@pytest.mark.parametrize("name", PLANNED)
def test_weights_blocks_and_sequences_are_those_of_the_recorded_plans(name: str):
    """FP8 and 16-bit caches, K = 0, 4 and 7, with and without prefix caching, on every planned GPU."""
    subject = find_subject(name, ROOT)
    settings = ServerSettings.of(subject, None, None)
    stored = size_checkpoint(list_optimised(subject)[0], settings)
    plans = [plan for plan in list_recorded_plans(ROOT, name) if plan.kv_cache is not None]
    assert plans
    for plan in plans:
        fit = fit_checkpoint(stored, settings, GPUS[plan.gpu], None)
        assert plan.kv_cache is not None
        assert fit.resident_bytes == pytest.approx(sum(plan.weight_bytes.values()), rel=2e-4)
        assert fit.cache_bytes == pytest.approx(plan.kv_cache.available_bytes, rel=2e-4)
        assert fit.kv_tokens == pytest.approx(plan.kv_cache.tokens, rel=1e-5)


def test_a_27b_on_a_24_gb_card_by_hand():
    _, settings, (stored, mlps, _, head, *_) = fitted("qwen3.5-27b", "rtx-3090")
    assert (settings.context_len, settings.sequences, settings.depth) == (32768, 1, 4)
    mlp = 64 * 3 * 5120 * 17408
    assert stored.weight_bytes["MLP"] == 2 * mlp
    # Four bits, a scale of 16 bits for 32 weights, 16 bytes of shape for each of 192 matrices.
    assert mlps.weight_bytes["MLP"] == mlp // 2 + mlp // 16 + 192 * 16
    assert head.weight_bytes["embedding"] == 2 * 248320 * 5120
    # 16 layers of full attention and one of the MTP head, 4 KV heads of 256, keys and values in 16 bits.
    assert stored.token_bytes == 17 * 2 * 4 * 256 * 2
    # A state page: 48 heads of 128 x 128 in float32, 10,240 channels of 3 tokens and 4 drafts in 16 bits; in tokens
    # of 4 KiB a block of 816. 48 layers are three groups of 17, each with a page for every one of K + 1 states.
    assert -(-(48 * 128 * 128 * 4 + 10240 * 7 * 2) // 4096 // 16) * 16 == 816
    assert stored.state_bytes == 15 * 816 * 17 * 4096
    assert stored.sequence_bytes == stored.state_bytes + 41 * 816 * 17 * 4096
    left = 0.9 * 23.69 * 2**30 - OVERHEAD_GIB * 2**30 - stored.resident_bytes
    assert stored.cache_bytes == pytest.approx(left, abs=1)
    assert stored.missing_bytes == stored.sequence_bytes - stored.cache_bytes
    assert [stored.fits, mlps.fits, head.fits] == [False, False, True]
    assert [replace(head, missing_bytes=missing).fits for missing in (-1, 0, 1)] == [True, True, False]
    # A step reads every weight but embedding and MTP head, the cache and twice the states: 936 GB a second.
    read = stored.resident_bytes - stored.weight_bytes["embedding"] - stored.weight_bytes["MTP head"]
    assert 936e9 / (1.01 * read) < stored.tokens_per_second < 936e9 / read


def test_drafts_pay_from_the_ratio_of_the_steps():
    _, _, (stored, *_) = fitted("qwen3.5-4b-best", "a10g")
    assert stored.break_even == pytest.approx(3.97 * stored.tokens_per_second / stored.drafted)
    _, _, (undrafted, *_) = fitted("qwen3.5-4b", "a10g")
    assert (undrafted.drafted, undrafted.break_even) == (None, None)


def test_what_a_config_env_leaves_out_has_the_default_of_vllm(add_variant, tmp_path):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "tiny").symlink_to(ROOT / "weights" / "tiny")
    add_variant("bare", "VLLM_MODEL=weights/tiny\n")
    add_variant(
        "said",
        "VLLM_MODEL=weights/tiny\nVLLM_MAX_MODEL_LEN=512\nVLLM_MAX_NUM_SEQS=3\nVLLM_ENABLE_PREFIX_CACHING=0\n"
        "VLLM_GPU_MEMORY_UTILIZATION=0.5\nVLLM_KV_CACHE_DTYPE=fp8\nVLLM_MAX_NUM_BATCHED_TOKENS=64\n"
        """VLLM_SPECULATIVE_CONFIG='{"method": "mtp", "num_speculative_tokens": 2}'\n""",
    )
    bare, said = (ServerSettings.of(find_subject(name, tmp_path), None, None) for name in ("bare", "said"))
    assert bare == ServerSettings(4096, 1, 0, utilization=0.92, prefix_caching=True, captured_sequences=None)
    assert said == ServerSettings(
        512, 3, 2, kv_cache_dtype="fp8", utilization=0.5, batched_tokens=64, captured_sequences=3
    )
    assert ServerSettings.of(find_subject("said", tmp_path), 128, 9) == replace(
        said, context_len=128, sequences=9, captured_sequences=9
    )


@pytest.mark.parametrize(
    ("model", "gpu", "captured", "starts"),
    [
        ("qwen3.5-9b", "rtx-4090", None, False),  # 192 blocks for vLLM's own 256 sequences
        ("qwen3.5-9b", "rtx-4090", 192, True),
        ("qwen3.5-9b", "rtx-4090", 193, False),
        ("qwen3.5-9b", "rtx-5080", 1, False),  # not even the weights
        ("qwen3.5-4b", "rtx-3060", None, False),
        ("qwen3.5-4b", "rtx-4060-ti", None, True),
        ("qwen3.5-9b", "h100", None, True),  # 3,294 blocks for 1,024 sequences
        ("qwen3-4b", "t4", None, True),  # without states
    ],
)
def test_a_server_has_a_block_for_the_states_of_each_sequence_that_vllm_takes(model, gpu, captured, starts):
    _, settings, (stored, *_) = fitted(model, gpu, sequences=1, captured_sequences=captured)
    assert stored.starts == stored.fits == starts
    if not starts and stored.missing_bytes <= 0:
        said = give_verdict(find_subject(model, ROOT), settings, GPUS[gpu], [stored])
        assert f"{stored.captured_sequences} sequences" in said
        assert said.endswith(f"set VLLM_MAX_NUM_SEQS to at most {stored.blocks}")
        assert fitted(model, gpu, sequences=1, captured_sequences=stored.blocks)[2][0].starts


def test_a_load_that_is_served_in_turns_is_said_to_start():
    subject, settings, fits = fitted("qwen3.5-4b", "rtx-3060")
    assert (fits[0].fits, fits[0].starts) == (False, True)
    said = give_verdict(subject, settings, GPUS["rtx-3060"], fits)
    assert "3.1 GB too much (vLLM starts, with 2 of them at a time); fits with 4-bit MLPs;" in said


@pytest.mark.parametrize("eager", ["0", "1"])
def test_an_engine_without_graphs_needs_no_block_for_each_sequence(eager):
    subject = find_subject("qwen3.5-9b", ROOT)
    lines = {**subject.settings, "VLLM_MAX_NUM_SEQS": "256", "VLLM_ENFORCE_EAGER": eager}
    settings = ServerSettings.of(replace(subject, settings=lines), None, None)
    assert settings.captured_sequences == (0 if eager == "1" else 256)


@pytest.mark.parametrize(
    ("line", "depth"),
    [
        ("""VLLM_SPECULATIVE_CONFIG='{"method": "ngram", "num_speculative_tokens": 2}'""", 0),
        ("""VLLM_SPECULATIVE_CONFIG='{"method": "qwen3_5_mtp", "num_speculative_tokens": 2}'""", 2),
        ("""VLLM_SPECULATIVE_CONFIG='{"method": "mtp"}'""", 1),
        ("VLLM_SPECULATIVE_CONFIG=null", 0),
    ],
)
def test_only_drafts_of_the_mtp_head_count(own_settings, line, depth):
    assert own_settings(line).depth == depth


@pytest.fixture
def own_settings(add_variant, tmp_path):
    """The settings of a variant of the embedded checkpoint with one more line."""

    def read(line):
        (tmp_path / "weights").mkdir()
        (tmp_path / "weights" / "tiny").symlink_to(ROOT / "weights" / "tiny")
        add_variant("own", f"VLLM_MODEL=weights/tiny\n{line}\n")
        return ServerSettings.of(find_subject("own", tmp_path), None, None)

    return read


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("1k", 1000), ("1K", 1024), ("1.5k", 1500), ("auto", 4096), ("Auto", 4096), ("-1", 4096), ("512", 512)],
)
def test_a_context_is_read_as_vllm_reads_it(own_settings, text, tokens):
    assert own_settings(f"VLLM_MAX_MODEL_LEN={text}").context_len == tokens


@pytest.mark.parametrize(
    "line",
    [
        "VLLM_MAX_MODEL_LEN=1.5K",
        "VLLM_MAX_MODEL_LEN=long",
        "VLLM_MAX_NUM_SEQS=1k",
        "VLLM_GPU_MEMORY_UTILIZATION=90%",
        "VLLM_SPECULATIVE_CONFIG={method",
    ],
)
def test_what_vllm_cannot_read_is_named_with_its_line(own_settings, line):
    with pytest.raises(
        FitError,
        match=f"^own: {line}: (vLLM cannot read this as a number; write one such as|this is not JSON; write it as in)",
    ):
        own_settings(line)


@pytest.mark.parametrize("length", [0, 40961])
def test_a_length_that_the_model_was_not_made_for_is_refused(length: int):
    with pytest.raises(FitError, match=r"made for contexts of 1 to 40,960 tokens, not .*; correct --context"):
        ServerSettings.of(find_subject("qwen3-4b", ROOT), length or -1, 1)


def test_two_gpus_share_weights_heads_and_states():
    subject = find_subject("qwen3.5-4b", ROOT)
    one = ServerSettings.of(subject, 8192, 1)
    two = replace(one, gpus=2)
    (stored, *_) = list_optimised(subject)
    whole, half = (size_checkpoint(stored, each).model for each in (one, two))
    for part in ("state_bytes", "kv_bytes", "attention_flops", "conv_row_bytes", "state_flops"):
        assert 2 * getattr(half, part) == getattr(whole, part)
    assert 2 * half.resident_bytes(4) == pytest.approx(whole.resident_bytes(4), abs=8)
    assert 2 * half.body.flops["bf16"] == whole.body.flops["bf16"]
    # The four KV heads are copied where there are more GPUs.
    assert size_checkpoint(stored, replace(one, gpus=8)).model.kv_bytes == whole.kv_bytes // 4
    assert 2 * estimate_activations(subject, two) == pytest.approx(estimate_activations(subject, one), abs=1)


@pytest.mark.parametrize(
    ("gpus", "said"),
    [(2, None), (8, None), (3, "3 GPUs cannot share 16 heads"), (32, "32 GPUs")],
)
def test_gpus_that_cannot_share_the_heads_are_refused(gpus: int, said: str | None):
    subject = find_subject("qwen3.5-4b", ROOT)
    shared = replace(subject, settings={"VLLM_TENSOR_PARALLEL_SIZE": str(gpus)})
    if said is None:
        assert ServerSettings.of(shared, None, None).gpus == gpus
    else:
        with pytest.raises(FitError, match=said):
            ServerSettings.of(shared, None, None)


def test_a_step_takes_room_for_its_tokens_and_its_logits():
    subject, settings, _ = fitted("qwen3-4b", "a10g")
    base = estimate_activations(subject, settings)
    assert base == 2048 * 2 * (4 * 2560 + 3 * 9728) + 151936 * 8
    assert estimate_activations(subject, replace(settings, sequences=3)) - base == 2 * 151936 * 8
