"""Passes and decode steps against arithmetic by hand."""

import pytest

from slimqwen.fit import FitError, cost
from slimqwen.fit.architecture import read_model
from slimqwen.plan.devices import Peaks
from tests.fit.shapes import (
    ATTENTION,
    BODY_BYTES,
    BODY_FLOPS,
    CONFIG,
    HEAD_BYTES,
    HEAD_FLOPS,
    KV,
    ROW,
    SLOW,
    SMALL,
    STATE,
    STATE_FLOPS,
    info,
    tensors,
)


def test_a_step_without_drafts_is_one_pass_by_hand():
    work = cost.count_verify_work(SMALL, batch_size=3, context_len=10)

    cache = 3 * 10 * KV + 3 * KV  # read, and written for the new token
    assert work.bytes == BODY_BYTES + HEAD_BYTES + 3 * ROW + cache + 3 * 2 * STATE
    assert work.flops == {"bf16": 3 * (BODY_FLOPS + HEAD_FLOPS + STATE_FLOPS + 10 * ATTENTION)}
    bound = cost.bound_decode_step(SMALL, SLOW, 3, 10)
    by_memory, by_flops = work.bytes / 1000, work.flops["bf16"] / 2000
    assert bound.seconds == pytest.approx(max(by_memory, by_flops))
    assert bound.tokens_per_second == pytest.approx(3 / max(by_memory, by_flops))
    # By hand in whole figures: 1184 + 512 + 48 + 528 + 1344 bytes; 3 (1152 + 512 + 192 + 320) flops.
    assert (work.bytes, work.flops["bf16"]) == (3616, 6528)
    assert bound.seconds == pytest.approx(3.616)


def test_four_drafts_are_a_pass_of_five_tokens_and_four_of_the_mtp_head():
    bound = cost.bound_decode_step(SMALL, SLOW, 1, 10, num_speculative_tokens=4, acceptance_length=3.5)

    verify_bytes = 1184 + 512 + 5 * 16 + (10 + 5) * 16 + 2 * 224
    draft_bytes = 512 + 512 + 16 + (10 + 1) * 16
    verify_flops = 5 * (1152 + 512 + 192 + 10 * 32)
    draft_flops = 512 + 512 + 10 * 32
    assert bound.bytes == verify_bytes + 4 * draft_bytes
    assert bound.flops == verify_flops + 4 * draft_flops
    # Verification is held up by flops, drafting by memory.
    assert verify_flops / 2000 > verify_bytes / 1000
    assert draft_bytes / 1000 > draft_flops / 2000
    assert bound.seconds == pytest.approx(verify_flops / 2000 + 4 * draft_bytes / 1000)
    assert bound.tokens_per_second == pytest.approx(3.5 / bound.seconds)


def test_drafts_of_a_trimmed_vocabulary_read_its_rows_and_the_verify_pass_reads_all():
    rows = {"mtp.draft_head.weight": info((4, 8)), "mtp.draft_head.token_ids": info((4,), "I64")}
    trimmed = read_model(tensors(**rows), CONFIG)
    assert cost.count_verify_work(trimmed, 1, 10, 4) == cost.count_verify_work(SMALL, 1, 10, 4)
    whole, few = cost.count_draft_work(SMALL, 1, 10), cost.count_draft_work(trimmed, 1, 10)
    assert (whole.bytes - few.bytes, whole.total_flops - few.total_flops) == (2 * 28 * 8, 2 * 28 * 8)
    # The rows are a copy: they and their ids take room beside the whole head, and only where there are drafts.
    assert trimmed.resident_bytes(4) == SMALL.resident_bytes(4) + (2 * 8 + 8) * 4
    assert trimmed.resident_bytes(0) == SMALL.resident_bytes(0)


def test_a_step_yields_between_one_token_and_those_that_it_verifies():
    for length in (1, 5):
        cost.bound_decode_step(SMALL, SLOW, 1, 10, 4, length)
    for length in (0.9, 5.1):
        with pytest.raises(FitError, match="give one between 1 and 5"):
            cost.bound_decode_step(SMALL, SLOW, 1, 10, 4, length)


def test_eight_bit_weights_run_at_their_own_peak_where_the_gpu_has_one():
    name = "model.layers.0.mlp.up_proj.weight"
    config = {**CONFIG, "quantization_config": {"quant_method": "fp8"}}
    eight = read_model(tensors(**{name: info((16, 8), "F8_E4M3")}), config)
    assert eight.body.flops == {"bf16": BODY_FLOPS - 256, "fp8": 256}
    work = cost.count_verify_work(eight, 1, 10)
    sixteen = sum(work.flops.values()) / 2000
    assert work.compute_seconds(SLOW) == pytest.approx(sixteen)
    faster = SLOW.model_copy(update={"dense_peak_tflops": Peaks(bf16=2e-9, fp8=4e-9)})
    assert work.compute_seconds(faster) == pytest.approx(sixteen - 256 / 4000)


def test_the_cache_grows_with_context_and_shrinks_with_its_dtype():
    assert cost.count_verify_work(SMALL, 2, 11).bytes - cost.count_verify_work(SMALL, 2, 10).bytes == 2 * KV
    assert cost.count_draft_work(SMALL, 2, 11).bytes - cost.count_draft_work(SMALL, 2, 10).bytes == 2 * KV
    eight = read_model(tensors(), CONFIG, kv_cache_dtype="fp8")
    scheme = {**CONFIG, "quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}
    assert eight.kv_bytes == read_model(tensors(), scheme).kv_bytes == KV // 2
    with pytest.raises(FitError, match="a KV cache in nvfp4"):
        read_model(tensors(), CONFIG, kv_cache_dtype="nvfp4")


def test_the_parts_of_a_step_add_up_to_its_bytes_by_hand():
    # Rows of the embedding, keys and values, states: of the verify pass, then of each draft pass.
    rest_of_verify, rest_of_draft = 5 * 16 + (10 + 5) * 16 + 2 * 224, 16 + (10 + 1) * 16
    parts = cost.count_part_bytes(SMALL, 4, 10)
    assert parts == {
        "layers": 1184,
        "output head": 512,
        "draft layers": 4 * 512,
        "draft head": 4 * 512,
        "states and KV cache": rest_of_verify + 4 * rest_of_draft,
    }
    assert sum(parts.values()) == cost.bound_decode_step(SMALL, SLOW, 1, 10, 4, 1.0).bytes
    plain = cost.count_part_bytes(SMALL, 0, 10)
    assert list(plain.values()) == [1184, 512, 0, 0, 16 + (10 + 1) * 16 + 2 * 224]
