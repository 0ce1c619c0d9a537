"""Bytes and FLOPs of checkpoints, against arithmetic by hand."""

import math
from pathlib import Path
from typing import Any

import pytest

from slimqwen import checkpoint
from slimqwen.checkpoint.config import write_config
from slimqwen.checkpoint.tensors import NewTensor, TensorInfo, list_tensors, write_tensors
from slimqwen.fit import FitError, cost
from slimqwen.fit.architecture import lay_out_cache, read_model
from slimqwen.formats.compressed_tensors import settings_of
from tests.fit.shapes import (
    BODY_BYTES,
    BODY_FLOPS,
    CONFIG,
    HEAD_BYTES,
    KV,
    MTP_BYTES,
    ROW,
    SHAPES,
    SMALL,
    STATE,
    info,
    tensors,
)


def test_a_stored_checkpoint_counts_as_its_tensors_lie_on_disk(tmp_path: Path):
    written = {
        name: NewTensor("BF16", shape, lambda shape=shape: [bytes(2 * math.prod(shape))])
        for name, shape in SHAPES.items()
    }
    write_tensors(tmp_path / "model.safetensors", written)
    write_config(tmp_path, CONFIG)

    found = read_model(list_tensors(tmp_path), checkpoint.read_config(tmp_path))

    assert found == SMALL
    assert (found.body.bytes, found.head.bytes, found.drafter.bytes) == (BODY_BYTES, HEAD_BYTES, MTP_BYTES)
    assert (found.kv_bytes, found.state_bytes, found.embedding_row_bytes) == (KV, STATE, ROW)


def test_an_untied_embedding_is_gathered_and_takes_room():
    untied = read_model(
        tensors(**{"lm_head.weight": info((32, 8))}), {**CONFIG, "tie_word_embeddings": False}
    )

    assert (SMALL.tied, untied.tied) == (True, False)
    assert cost.count_verify_work(untied, 1, 10) == cost.count_verify_work(SMALL, 1, 10)
    assert untied.resident_bytes(0) == SMALL.resident_bytes(0) + 2 * 256
    with pytest.raises(FitError, match=r"no lm_head, but its config\.json does not tie it"):
        read_model(tensors(), {**CONFIG, "tie_word_embeddings": False})


def packed(name: str, rows: int, inputs: int, group: int = 8) -> dict[str, TensorInfo]:
    return {
        f"{name}_packed": info((rows, inputs // 8), "I32"),
        f"{name}_scale": info((rows, inputs // group)),
        f"{name}_shape": info((2,), "I64"),
    }


def test_four_bits_save_bytes_and_no_flops():
    groups = {"group_0": {"targets": ["Linear", "lm_head"], "weights": {"num_bits": 4}}}
    name = "model.layers.0.mlp.up_proj.weight"
    small = read_model(
        tensors(**{name: None, **packed(name, 16, 8), **packed("lm_head.weight", 32, 8)}),
        {**CONFIG, "quantization_config": settings_of(groups, ())},
    )

    # 16 x 8 numbers: 256 bytes become 64 and a scale of 2 bytes a row; the shape's 16 bytes are not read.
    assert small.body.bytes == BODY_BYTES - 256 + 64 + 16 * 2
    assert small.head.bytes == 32 * 8 // 2 + 32 * 2
    assert not small.tied
    assert cost.count_verify_work(small, 2, 10).flops == cost.count_verify_work(SMALL, 2, 10).flops


def test_a_packed_embedding_is_gathered_row_by_row():
    groups = {"group_0": {"targets": ["lm_head", "re:.*embed_tokens$"], "weights": {"num_bits": 4}}}
    name = "model.embed_tokens.weight"
    small = read_model(
        tensors(**{name: None, **packed(name, 32, 8), **packed("lm_head.weight", 32, 8)}),
        {**CONFIG, "tie_word_embeddings": False, "quantization_config": settings_of(groups, ())},
    )
    assert small.embedding_row_bytes == 8 // 2 + 2
    assert small.resident_bytes(0) == BODY_BYTES + 2 * 32 * (8 // 2 + 2)
    assert cost.count_verify_work(small, 2, 10).flops == cost.count_verify_work(SMALL, 2, 10).flops


def test_each_packed_linear_has_the_width_of_the_group_that_names_it():
    groups = {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 8}},
        "lm_head": {"targets": ["re:.*lm_head$"], "weights": {"num_bits": 4}},
    }
    name = "model.layers.0.mlp.up_proj.weight"
    eight_bits = {f"{name}_packed": info((16, 2), "I32"), f"{name}_scale": info((16, 1))}
    mixed = read_model(
        tensors(**{name: None, **eight_bits, **packed("lm_head.weight", 32, 8)}),
        {**CONFIG, "quantization_config": settings_of(groups, ())},
    )
    assert mixed.body.bytes == BODY_BYTES - 256 + 128 + 16 * 2
    assert cost.count_verify_work(mixed, 2, 10).flops == cost.count_verify_work(SMALL, 2, 10).flops


def test_packings_that_are_not_known_are_refused():
    name = "model.layers.0.mlp.up_proj.weight"
    given = tensors(**{name: None, **packed(name, 16, 8)})
    with pytest.raises(
        FitError, match=r"config.json does not say how .*up_proj\.weight is stored \(I32\); correct"
    ):
        read_model(given, CONFIG)
    with pytest.raises(FitError, match="head_dim: Field required"):
        read_model(tensors(), {key: value for key, value in CONFIG.items() if key != "head_dim"})


def test_words_of_gptq_and_bytes_of_nvfp4_hold_many_numbers():
    name = "model.layers.0.mlp.up_proj."
    parts = {
        "gptq": {"qweight": info((1, 16), "I32"), "scales": info((1, 16)), "qzeros": info((1, 2), "I32")},
        "modelopt": {"weight": info((16, 4), "U8"), "weight_scale": info((16, 1), "F8_E4M3")},
    }
    for method, stored in parts.items():
        linear = {f"{name}weight": None, **{f"{name}{part}": one for part, one in stored.items()}}
        form = {"quant_method": method, "bits": 4}
        found = read_model(tensors(**linear), {**CONFIG, "quantization_config": form})
        assert found.body.flops == SMALL.body.flops
        assert found.body.bytes == BODY_BYTES - 256 + sum(one.end for one in stored.values())


def mixture(count: int = 8, used: int = 2) -> tuple[dict[str, TensorInfo], dict[str, Any]]:
    """SMALL with routed experts in the place of its MLPs."""
    names = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1)]
    experts = {f"model.layers.{layer}.mlp.experts.gate_up_proj": info((count, 16, 8)) for layer in (0, 1)}
    settings = {"num_experts": count, "num_experts_per_tok": used}
    config = {**CONFIG, "architectures": ["Qwen3_5MoeForCausalLM"], **settings}
    return tensors(**dict.fromkeys(names), **experts), config


def test_a_token_reads_the_experts_that_it_is_sent_to_and_a_batch_most_of_them():
    model = read_model(*mixture())
    others, every = BODY_BYTES - 2 * 256, 2 * 8 * 256
    assert (model.body.bytes, model.body.expert_bytes) == (others + every, every)
    assert model.resident_bytes(0) == others + every + HEAD_BYTES
    assert model.body.read_bytes(1) == others + every / 4
    # A second token goes to a quarter of the experts too, three quarters of which the first did not read.
    assert model.body.read_bytes(2) == pytest.approx(others + every * (1 / 4 + 3 / 16))
    # A token is multiplied with two of the eight experts, each as large as the MLP of SMALL.
    assert model.body.flops == {"bf16": BODY_FLOPS + 2 * 256}


def test_a_model_without_gated_deltanet_has_small_blocks_and_no_states():
    names = [name for name in SHAPES if "layers.0" in name or name.startswith("mtp.")]
    config = {**CONFIG, "architectures": ["Qwen3ForCausalLM"], "layer_types": ["full_attention"]}
    model = read_model(tensors(**dict.fromkeys(names)), config)
    layout = lay_out_cache(model, 0)
    assert (model.state_bytes, model.drafter.bytes, layout.state_blocks) == (0, 0, 0)
    assert (layout.block_size, layout.block_bytes) == (16, 16 * KV)
    assert (layout.sequence_blocks(16), layout.sequence_blocks(17)) == (1, 2)


def test_floats_of_32_bits_are_served_in_16_and_a_vision_tower_is_not_read():
    name = "model.layers.0.mlp.up_proj.weight"
    other = {name: info((16, 8), "F32"), "model.visual.blocks.0.weight": info((64, 64))}
    assert cost.count_verify_work(read_model(tensors(**other), CONFIG), 1, 1) == cost.count_verify_work(
        SMALL, 1, 1
    )


def test_states_have_the_dtype_that_vllm_gives_them():
    unsaid = {key: value for key, value in CONFIG.items() if key != "mamba_ssm_dtype"}
    saved = 2 * 4 * 4 * 2
    assert read_model(tensors(), unsaid).state_bytes == STATE - saved
    assert read_model(tensors(), CONFIG, state_dtype="bfloat16").state_bytes == STATE - saved
    with pytest.raises(FitError, match="a recurrent state in int8"):
        read_model(tensors(), CONFIG, state_dtype="int8")


@pytest.mark.parametrize(
    ("dtype", "number_bytes"),
    [("int8_per_token_head", 1), ("fp8_per_token_head", 1), ("int4_per_token_head", 0.5)],
)
def test_a_cache_with_scales_has_four_bytes_more_for_each_head_of_keys_and_of_values(
    dtype: str, number_bytes
):
    """As `TritonAttentionBackend.customize_spec` of vLLM 0.32 lays it out."""
    found = read_model(tensors(), CONFIG, kv_cache_dtype=dtype)
    heads = CONFIG["num_key_value_heads"]
    assert found.kv_bytes == 2 * heads * (CONFIG["head_dim"] * number_bytes + 4)
    assert found.attention_precision == "bf16"
