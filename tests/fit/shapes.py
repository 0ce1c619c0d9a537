"""A model small enough to count by hand, and a GPU slow enough to divide by."""

import math
from pathlib import Path
from typing import Any

from slimqwen.checkpoint.tensors import TensorInfo
from slimqwen.fit.architecture import read_model
from slimqwen.plan.devices import Driver, Gpu, Peaks

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
BODY_BYTES, BODY_FLOPS = 2 * (576 + 16), 2 * 576
HEAD_BYTES, HEAD_FLOPS = 2 * 256, 2 * 256
MTP_BYTES, MTP_FLOPS = 2 * 256, 2 * 256
ROW = 2 * 8
KV = 2 * 1 * 4 * 2  # keys and values, one head of 4, 16 bits
ATTENTION = 4 * 2 * 4  # QK and AV, two heads of 4
STATE = 2 * 4 * 4 * 4 + 16 * 3 * 2  # two heads of 4 x 4 in float32; 16 channels, 3 earlier tokens, 16 bits
STATE_FLOPS = 6 * 2 * 4 * 4

SLOW = Gpu(
    name="slow",
    nvidia_smi=("NVIDIA Slow",),
    memory_bandwidth_gb_per_s=1e-6,  # 1,000 bytes a second
    memory_gib=1,
    compute_capability="8.0",
    dense_peak_tflops=Peaks(bf16=2e-9),  # 2,000 flops a second
    source="nobody",
    driver=Driver(multiprocessors=1),
)


def info(shape: tuple[int, ...], dtype: str = "BF16") -> TensorInfo:
    width = {"BF16": 2, "F32": 4, "I32": 4, "I64": 8, "F8_E4M3": 1, "U8": 1}[dtype]
    return TensorInfo(dtype, shape, Path("none"), 0, width * math.prod(shape))


def tensors(**changes: TensorInfo | None) -> dict[str, TensorInfo]:
    found = {name: info(shape) for name, shape in SHAPES.items()} | changes
    return {name: one for name, one in found.items() if one is not None}


SMALL = read_model(tensors(), CONFIG)
