"""Bounds against arithmetic done by hand, on shapes small enough to do it, and on the published 4B shape."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimqwen import checkpoint, variant
from slimqwen.checkpoint import MissingCheckpointError, NewTensor, TensorInfo
from slimqwen.evaluation import roofline
from slimqwen.evaluation.roofline import DevicesError, Gpu, Peaks, RooflineError, UnknownGpuError
from slimqwen.records import results, store
from slimqwen.report import plots

ROOT = variant.repository_root()

# One Gated DeltaNet layer, one layer with full attention, an MTP head: hidden 8, MLP 16, 32 tokens.
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 64,
    "mamba_ssm_dtype": "float32",
    "tie_word_embeddings": True,
}
SHAPES = {
    "model.embed_tokens.weight": (32, 8),
    "model.layers.0.linear_attn.in_proj_qkv.weight": (16, 8),
    "model.layers.0.linear_attn.conv1d.weight": (16, 1, 4),
    "model.layers.0.input_layernorm.weight": (8,),
    "model.layers.0.mlp.up_proj.weight": (16, 8),
    "model.layers.1.self_attn.q_proj.weight": (16, 8),
    "model.layers.1.mlp.up_proj.weight": (16, 8),
    "model.norm.weight": (8,),
    "mtp.fc.weight": (8, 16),
    "mtp.layers.0.mlp.up_proj.weight": (16, 8),
}
# By hand: matrices of the body 128 + 64 + 128 + 128 + 128 = 576 numbers, norms 8 + 8; head 256; MTP head 256.
BODY_BYTES, BODY_OPERATIONS = 2 * (576 + 16), 2 * 576
HEAD_BYTES, HEAD_OPERATIONS = 2 * 256, 2 * 256
MTP_BYTES, MTP_OPERATIONS = 2 * 256, 2 * 256
ROW = 2 * 8
KV = 2 * 1 * 4 * 2  # keys and values, one head of 4, 16 bits
ATTENTION = 4 * 2 * 4  # QK and AV, two heads of 4
STATE = 2 * 4 * 4 * 4 + 16 * 3 * 2  # two heads of 4 x 4 in float32; 16 channels, 3 earlier tokens, 16 bits
STATE_OPERATIONS = 6 * 2 * 4 * 4

SLOW = Gpu(
    name="slow",
    nvidia_smi=("NVIDIA Slow",),
    memory_bandwidth_gb_per_s=1e-6,  # 1,000 bytes a second
    memory_gib=1,
    l2_cache_mb=1e-6,
    compute_capability="8.0",
    dense_peak_tflops=Peaks(bf16=2e-9),  # 2,000 operations a second
    source="nobody",
)


def info(shape: tuple[int, ...], dtype: str = "BF16") -> TensorInfo:
    width = {"BF16": 2, "F32": 4, "I32": 4, "I64": 8, "F8_E4M3": 1}[dtype]
    return TensorInfo(dtype, shape, Path("none"), 0, width * math.prod(shape))


def tensors(**changes: TensorInfo | None) -> dict[str, TensorInfo]:
    found = {name: info(shape) for name, shape in SHAPES.items()} | changes
    return {name: one for name, one in found.items() if one is not None}


SMALL = roofline.model(tensors(), CONFIG)


def test_a_stored_checkpoint_counts_as_its_tensors_lie_on_disk(tmp_path: Path):
    written = {
        name: NewTensor("BF16", shape, lambda shape=shape: [bytes(2 * math.prod(shape))])
        for name, shape in SHAPES.items()
    }
    checkpoint.write_tensors(tmp_path / "model.safetensors", written)
    checkpoint.write_config(tmp_path, CONFIG)

    found = roofline.model(checkpoint.tensors(tmp_path), checkpoint.read_config(tmp_path))

    assert found == SMALL
    assert (found.body.bytes, found.head.bytes, found.drafter.bytes) == (BODY_BYTES, HEAD_BYTES, MTP_BYTES)
    assert (found.kv_bytes, found.state_bytes, found.row_bytes) == (KV, STATE, ROW)


def test_a_step_without_drafts_is_one_pass_by_hand():
    work = SMALL.verify(sequences=3, context=10)

    cache = 3 * 10 * KV + 3 * KV  # read, and written for the new token
    assert work.bytes == BODY_BYTES + HEAD_BYTES + 3 * ROW + cache + 3 * 2 * STATE
    assert work.operations == {
        "bf16": 3 * (BODY_OPERATIONS + HEAD_OPERATIONS + STATE_OPERATIONS + 10 * ATTENTION)
    }
    bound = roofline.decode(SMALL, SLOW, 3, 10)
    by_memory, by_operations = work.bytes / 1000, work.operations["bf16"] / 2000
    assert bound.seconds == pytest.approx(max(by_memory, by_operations))
    assert bound.tokens_per_second == pytest.approx(3 / max(by_memory, by_operations))
    # By hand in whole figures: 1184 + 512 + 48 + 528 + 1344 bytes; 3 (1152 + 512 + 192 + 320) operations.
    assert (work.bytes, work.operations["bf16"]) == (3616, 6528)
    assert (bound.seconds, bound.limited_by) == (pytest.approx(3.616), "memory")


def test_four_drafts_are_a_pass_of_five_tokens_and_four_of_the_mtp_head():
    bound = roofline.decode(SMALL, SLOW, 1, 10, depth=4, acceptance_length=3.5)

    verify_bytes = 1184 + 512 + 5 * 16 + (10 + 5) * 16 + 2 * 224
    draft_bytes = 512 + 512 + 16 + (10 + 1) * 16
    verify_operations = 5 * (1152 + 512 + 192 + 10 * 32)
    draft_operations = 512 + 512 + 10 * 32
    assert bound.bytes == verify_bytes + 4 * draft_bytes
    assert bound.operations == verify_operations + 4 * draft_operations
    # Verification is held up by operations, drafting by memory.
    assert verify_operations / 2000 > verify_bytes / 1000
    assert draft_bytes / 1000 > draft_operations / 2000
    assert bound.limited_by == "operations"
    assert bound.seconds == pytest.approx(verify_operations / 2000 + 4 * draft_bytes / 1000)
    assert bound.tokens_per_second == pytest.approx(3.5 / bound.seconds)
    assert SMALL.step_weights(4) == 1184 + 512 + 4 * (512 + 512)
    assert SMALL.step_weights(0) == 1184 + 512


def test_no_step_yields_more_tokens_than_it_verifies():
    for length in (0.9, 5.1):
        with pytest.raises(RooflineError, match="lies between 1 and 5"):
            roofline.decode(SMALL, SLOW, 1, 10, 4, length)


def test_a_prompt_is_one_pass_with_causal_attention_and_one_row_of_logits():
    work = SMALL.prefill(5)
    assert work.bytes == BODY_BYTES + HEAD_BYTES + 5 * (ROW + KV) + STATE
    assert (
        work.operations["bf16"] == 5 * (BODY_OPERATIONS + STATE_OPERATIONS) + HEAD_OPERATIONS + 15 * ATTENTION
    )
    drafting = SMALL.prefill(5, depth=4)
    assert drafting.bytes - work.bytes == MTP_BYTES + 5 * KV
    assert drafting.operations["bf16"] - work.operations["bf16"] == 5 * MTP_OPERATIONS + 15 * ATTENTION


def test_an_untied_embedding_is_gathered_and_takes_room():
    untied = roofline.model(
        tensors(**{"lm_head.weight": info((32, 8))}), {**CONFIG, "tie_word_embeddings": False}
    )

    assert (SMALL.tied, untied.tied) == (True, False)
    assert untied.verify(1, 10) == SMALL.verify(1, 10)
    assert untied.resident_bytes(0) == SMALL.resident_bytes(0) + 2 * 256
    with pytest.raises(RooflineError, match="no lm_head, yet its config ties no embeddings"):
        roofline.model(tensors(), {**CONFIG, "tie_word_embeddings": False})


def packed(name: str, rows: int, inputs: int, group: int = 8) -> dict[str, TensorInfo]:
    return {
        f"{name}_packed": info((rows, inputs // 8), "I32"),
        f"{name}_scale": info((rows, inputs // group)),
        f"{name}_shape": info((2,), "I64"),
    }


def test_four_bits_save_bytes_and_no_operations():
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4}}}
    name = "model.layers.0.mlp.up_proj.weight"
    small = roofline.model(
        tensors(**{name: None, **packed(name, 16, 8), **packed("lm_head.weight", 32, 8)}),
        {**CONFIG, "quantization_config": {"config_groups": groups}},
    )

    # 16 x 8 numbers: 256 bytes become 64 and a scale of 2 bytes a row; the shape's 16 bytes are not read.
    assert small.body.bytes == BODY_BYTES - 256 + 64 + 16 * 2
    assert small.body.dtypes == {"BF16": BODY_BYTES - 256 + 32, "I32": 64}
    assert small.head.bytes == 32 * 8 // 2 + 32 * 2
    assert not small.tied
    assert small.verify(2, 10).operations == SMALL.verify(2, 10).operations


def test_packings_that_are_not_known_are_refused():
    name = "model.layers.0.mlp.up_proj.weight"
    given = tensors(**{name: None, **packed(name, 16, 8)})
    with pytest.raises(RooflineError, match="gives packed weights 0 widths"):
        roofline.model(given, CONFIG)
    with pytest.raises(RooflineError, match="AutoAWQ or GPTQ"):
        roofline.model(tensors(**{name[:-6] + "qweight": info((1, 16), "I32")}), CONFIG)
    with pytest.raises(RooflineError, match="take a dense model"):
        roofline.model(tensors(), {**CONFIG, "num_experts": 8})
    with pytest.raises(RooflineError, match="head_dim: Field required"):
        roofline.model(tensors(), {key: value for key, value in CONFIG.items() if key != "head_dim"})


def test_floats_of_32_bits_are_served_in_16_and_a_vision_tower_is_not_read():
    name = "model.layers.0.mlp.up_proj.weight"
    other = {name: info((16, 8), "F32"), "model.visual.blocks.0.weight": info((64, 64))}
    assert roofline.model(tensors(**other), CONFIG).verify(1, 1) == SMALL.verify(1, 1)


def test_eight_bit_weights_run_at_their_own_peak_where_the_gpu_has_one():
    name = "model.layers.0.mlp.up_proj.weight"
    eight = roofline.model(tensors(**{name: info((16, 8), "F8_E4M3")}), CONFIG)
    assert eight.body.operations == {"bf16": BODY_OPERATIONS - 256, "fp8": 256}
    work = eight.verify(1, 10)
    sixteen = sum(work.operations.values()) / 2000
    assert work.compute_seconds(SLOW) == pytest.approx(sixteen)
    faster = SLOW.model_copy(update={"dense_peak_tflops": Peaks(bf16=2e-9, fp8=4e-9)})
    assert work.compute_seconds(faster) == pytest.approx(sixteen - 256 / 4000)


def test_the_cache_grows_with_context_and_shrinks_with_its_dtype():
    assert SMALL.verify(2, 11).bytes - SMALL.verify(2, 10).bytes == 2 * KV
    assert SMALL.draft(2, 11).bytes - SMALL.draft(2, 10).bytes == 2 * KV
    assert SMALL.sequence_bytes(10, 4) - SMALL.sequence_bytes(10, 0) == 10 * KV
    eight = roofline.model(tensors(), CONFIG, kv_cache_dtype="fp8")
    scheme = {**CONFIG, "quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}
    assert eight.kv_bytes == roofline.model(tensors(), scheme).kv_bytes == KV // 2
    with pytest.raises(RooflineError, match="VLLM_KV_CACHE_DTYPE=nvfp4"):
        roofline.model(tensors(), CONFIG, kv_cache_dtype="nvfp4")


def test_states_have_the_dtype_that_vllm_gives_them():
    unsaid = {key: value for key, value in CONFIG.items() if key != "mamba_ssm_dtype"}
    saved = 2 * 4 * 4 * 2
    assert roofline.model(tensors(), unsaid).state_bytes == STATE - saved
    assert roofline.model(tensors(), CONFIG, state_dtype="bfloat16").state_bytes == STATE - saved
    with pytest.raises(RooflineError, match="recurrent states in int8"):
        roofline.model(tensors(), CONFIG, state_dtype="int8")


contexts = st.integers(1, 100_000)
batches = st.integers(1, 1024)
depths = st.integers(0, 8)


@given(contexts, batches, depths, st.floats(1, 10_000), st.floats(1, 8))
def test_more_bandwidth_never_lowers_a_bound(
    context: int, sequences: int, depth: int, gb: float, factor: float
):
    rates = [
        roofline.decode(
            SMALL, SLOW.model_copy(update={"memory_bandwidth_gb_per_s": each}), sequences, context, depth
        ).tokens_per_second
        for each in (gb * 1e-9, gb * factor * 1e-9)
    ]
    assert rates[0] <= rates[1]


@given(contexts, contexts, batches, depths)
def test_a_longer_context_never_raises_a_bound(context: int, more: int, sequences: int, depth: int):
    short, long = (roofline.decode(SMALL, SLOW, sequences, each, depth) for each in (context, context + more))
    assert long.tokens_per_second <= short.tokens_per_second


@given(contexts, batches, batches)
def test_a_larger_batch_never_yields_less(context: int, sequences: int, more: int):
    few, many = (
        roofline.decode(SMALL, SLOW, each, context).tokens_per_second
        for each in (sequences, sequences + more)
    )
    assert many >= few * (1 - 1e-12)


def test_the_published_4b_shape_has_the_bound_of_its_size():
    import torch
    import transformers

    config = transformers.Qwen3_5TextConfig(
        vocab_size=248_320,
        hidden_size=2560,
        intermediate_size=9216,
        num_hidden_layers=32,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        built = transformers.Qwen3_5ForCausalLM(config)
    shapes = {name: info(tuple(parameter.shape)) for name, parameter in built.named_parameters()}

    found = roofline.model(shapes, {**config.to_dict(), "mamba_ssm_dtype": "float32"})

    # By hand: MLP 3 x 2560 x 9216; full attention q and gate 2 x 4096, k and v 1024 each, out 4096;
    # Gated DeltaNet q, k 2048 each, v 4096, gate 4096, a and b 32 each, out 4096, convolution 8192 x 4.
    mlp = 3 * 2560 * 9216
    full = 2560 * (2 * 4096 + 2 * 1024 + 4096)
    linear = 2560 * (2 * 2048 + 4096 + 4096 + 2 * 32 + 4096) + 8192 * 4
    matrices = 32 * mlp + 8 * full + 24 * linear
    assert found.body.operations == {"bf16": 2 * matrices}
    assert found.body.bytes == pytest.approx(2 * matrices, rel=1e-4)
    assert found.head.bytes == 2 * 248_320 * 2560
    assert found.attention_layers * found.kv_bytes == 32 * 1024
    assert found.state_bytes == 24 * (32 * 128 * 128 * 4 + 8192 * 3 * 2)
    # 4.2 billion weights in 16 bits at 600 GB/s: 14 ms a token.
    bound = roofline.decode(found, roofline.gpu("a10g", ROOT), 1, 128)
    assert bound.limited_by == "memory"
    assert 68 < bound.tokens_per_second < 72


def test_every_gpu_of_the_file_is_read_and_names_only_itself():
    known = roofline.gpus(ROOT)
    assert set(known) == {
        *("a10", "a10g", "a100-40gb", "a100", "h100", "h200"),
        *("l4", "l40s", "rtx-3090", "rtx-4090"),
    }
    names = [name for one in known.values() for name in one.nvidia_smi]
    assert len(names) == len(set(names))
    assert (known["a10g"].peak("bf16"), known["a10g"].bandwidth) == (70e12, 600e9)
    assert known["a10g"].peak("fp8") == known["a10g"].peak("bf16")
    for one in known.values():
        # 8-bit floats have units of their own from compute capability 8.9 on.
        assert (one.dense_peak_tflops.fp8 is not None) == (one.compute_capability >= "8.9")
    assert [known[name].default_sequences for name in ("a10g", "a100", "h100")] == [256, 256, 1024]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("h1000", "did you mean h100?"),
        ("rtx4090", "did you mean rtx-4090?"),
        ("tpu-v5", "it has a10g, a10, a100-40gb"),
    ],
)
def test_an_unknown_gpu_names_the_nearest(name: str, said: str):
    with pytest.raises(
        UnknownGpuError, match=rf"there is no GPU '{name}' in eval/devices\.yaml; {said[:-1]}"
    ):
        roofline.gpu(name, ROOT)


def test_a_faulty_file_of_gpus_is_one_line(tmp_path: Path):
    with pytest.raises(DevicesError, match=r"devices\.yaml is missing"):
        roofline.gpus(tmp_path)
    file = tmp_path / "eval" / "devices.yaml"
    file.parent.mkdir()
    good = (ROOT / "eval" / "devices.yaml").read_text()
    for wrong, said in (
        (good.replace("600", "-600", 1), "memory_bandwidth_gb_per_s: Input should be greater than 0"),
        (good.replace("bf16: 70, ", "", 1), "dense_peak_tflops.bf16: Field required"),
        (good.replace("source:", "sauce:", 1), "source: Field required"),
        ("a10g: [", "unusable"),
        ("- a10g", "unusable"),
    ):
        file.write_text(wrong)
        with pytest.raises(DevicesError, match="its first lines say what it takes") as raised:
            roofline.gpus(tmp_path)
        assert said in str(raised.value)
        assert "\n" not in str(raised.value)


@pytest.fixture
def repository(add_variant, tmp_path: Path) -> Path:
    """tiny, a variant of it that drafts, and a third without weights, in a repository of their own."""
    config = (ROOT / "experiments" / "tiny" / "config.env").read_text()
    add_variant("tiny", config)
    drafts = """VLLM_SPECULATIVE_CONFIG='{"method": "mtp", "num_speculative_tokens": 4}'"""
    add_variant("drafting", f"BASE=tiny\nVLLM_MAX_NUM_SEQS=8\n{drafts}\n", baseline="tiny")
    recipe = add_variant("absent", "BASE=tiny\nVLLM_MODEL=weights/absent\n").with_name("recipe.yaml")
    recipe.write_text("")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "tiny").symlink_to(ROOT / "weights" / "tiny")
    (tmp_path / "eval").mkdir()
    shutil.copy(ROOT / "eval" / "devices.yaml", tmp_path / "eval")
    return tmp_path


def accepted(root: Path, digest: str, length: float) -> Path:
    example = json.loads((ROOT / "tests" / "records" / "data" / "acceptance.json").read_text())
    estimate = {"value": length, "standard_error": 0.1, "count": 2}
    example["depths"] = [{"depth": 4, "tokens_per_second": 1.0, "length": estimate, "settings": []}]
    example["provenance"]["checkpoint"]["digest"] = digest
    return store.write(root / "experiments" / "drafting", example | {"variant": "drafting"}, [{"group": 0}])


def test_a_variant_is_bounded_beside_its_baseline(repository: Path):
    on = roofline.gpu("a10g", repository)
    compared = roofline.chain(variant.load("drafting", repository), ["tiny", "drafting"])
    assert [one.name for one in compared] == ["tiny", "drafting"]
    digest = checkpoint.digest(repository / "weights" / "tiny")

    unsaid = roofline.analyse(compared, on)
    tiny, drafting = unsaid["variants"]
    assert unsaid["contexts"] == [128, 2048, 4096]
    assert {row["depth"] for row in drafting["decode"]} == {0}
    assert "drafting: acceptance length at K = 4 (unknown, so only without speculation: there is no " in str(
        unsaid["notes"]
    )
    assert [row["one_over_baseline"] for row in drafting["decode"]] == [1, 1, 1]
    assert [row["all"]["sequences"] for row in drafting["decode"]] == [8, 8, 8]
    assert drafting["decode"][0]["all_over_baseline"] > 4
    # Its embedding is its head: all that is stored but the MTP head is read.
    assert tiny["decode"][0]["weights_bytes_per_step"] == sum(
        one.end - one.start
        for name, one in checkpoint.tensors(repository / "weights" / "tiny").items()
        if not name.startswith("mtp.")
    )

    given = roofline.analyse(compared, on, acceptance_length=3.0)["variants"][1]
    assert given["acceptance_length"]["source"].startswith("assumed: there is no acceptance record")
    assert [row["depth"] for row in given["decode"]] == [0, 0, 0, 4, 4, 4]

    other = accepted(repository, "ab" * 32, 4.5)
    stale = roofline.analyse(compared, on)["variants"][1]["acceptance_length"]
    assert (stale["value"], stale["source"].partition(": ")[2]) == (
        None,
        f"drafting/{other.name} is of another checkpoint",
    )

    other.unlink()
    other.with_suffix(".items.jsonl").unlink()
    record = accepted(repository, digest, 4.5)
    found = roofline.analyse(compared, on, acceptance_length=3.0)
    best = found["variants"][1]
    assert best["acceptance_length"] == {
        "value": 4.5,
        "source": f"drafting/{record.name}, K = 4",
    }
    shown, all_shown = plots.roofline(found)
    assert [line.label for line in shown.lines] == ["tiny", "drafting, K = 4"]
    assert all_shown.lines[1].y == [row["all"]["tokens_per_second"] for row in best["decode"][3:]]
    assert "drafting: not measured on this GPU" in found["notes"]

    written = results.write(
        "roofline",
        compared[1],
        found,
        command=["x"],
        started="2026-01-01T00:00:00Z",
        devices="ab" * 32,
    )
    assert json.loads(written.read_text())["variants"][1] == best


def test_missing_weights_name_the_command_that_makes_them(repository: Path):
    absent = variant.load("absent", repository)
    with pytest.raises(MissingCheckpointError, match=r"`make recipe VARIANT=absent` makes it"):
        roofline.analyse([absent], roofline.gpu("a10g", repository))


def test_a_gpu_without_room_is_refused(repository: Path):
    small = roofline.gpu("a10g", repository).model_copy(update={"memory_gib": 0.005})
    with pytest.raises(RooflineError, match=r"may use 92% of a10g's .*; take a larger GPU"):
        roofline.analyse([variant.load("tiny", repository)], small)


def test_only_a_record_of_this_gpu_and_checkpoint_is_held_against_a_bound(repository: Path):
    on = roofline.gpu("a10g", repository)
    one = variant.load("tiny", repository)
    of_cpu = next((ROOT / "experiments" / "tiny").glob("latency_*.json"))
    record = json.loads(of_cpu.read_text())
    file = repository / "experiments" / "tiny" / of_cpu.name
    file.write_text(json.dumps(record))
    assert roofline.analyse([one], on)["variants"][0]["measured"] == []

    gpu = {"name": "NVIDIA A10G", "memory_bytes": 24 * 10**9, "driver": "1"}
    record["provenance"]["hardware"]["gpus"] = [gpu]
    file.write_text(json.dumps(record))
    short = roofline.analyse([one], on)["variants"][0]["measured"][0]
    assert short["class"] == "short"
    assert short["tokens_per_second"] == record["classes"]["short"]["output_throughput_tokens_per_s"]
    # By hand: 31 prompt tokens at once, then 61 steps.
    of = roofline.model(checkpoint.tensors(one.weights), checkpoint.read_config(one.weights))
    seconds = of.prefill(31).seconds(on) + 61 * of.verify(1, 31).seconds(on)
    assert short["bound_tokens_per_second"] == pytest.approx(62 / seconds)
    assert short["share_of_bound"] == pytest.approx(short["tokens_per_second"] * seconds / 62)

    for changed in ({**gpu, "name": "NVIDIA A10"}, None):
        record["provenance"]["hardware"]["gpus"] = [changed or gpu]
        record["provenance"]["checkpoint"]["digest"] = (
            "0" * 64 if changed is None else record["provenance"]["checkpoint"]["digest"]
        )
        file.write_text(json.dumps(record))
        assert roofline.analyse([one], on)["variants"][0]["measured"] == []
