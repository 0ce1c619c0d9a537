"""Architecture of a Qwen3.5 checkpoint: bytes and FLOPs per token of its parts, read from tensor shapes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, PositiveInt, ValidationError

from slimqwen import checkpoint
from slimqwen.checkpoint import draft_head
from slimqwen.checkpoint.packing import PACKED, packed_bits
from slimqwen.checkpoint.tensors import TensorInfo, tensor_bytes
from slimqwen.models.shape import Shape
from slimqwen.roofline.gpu import GpuSheet, Precision, RooflineError

SIXTEEN_BIT = 2
"""Bytes per number in the dtype that vLLM computes in, float16 or bfloat16."""

MEMORY_UTILIZATION = 0.92
"""vLLM's default of --gpu-memory-utilization."""

_STATE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_KV_BYTES = {"float16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
_PRECISIONS: Mapping[str, Precision] = {"F8_E4M3": "fp8", "F8_E5M2": "fp8", "I8": "int8"}

_STATE_FLOPS = 6
"""Per token and number of the recurrent state: key read, update, query read, one multiply-add each."""


@dataclass(frozen=True)
class Weights:
    """Weights that one pass reads whole: their bytes, and FLOPs per token by precision."""

    bytes: int
    flops: Mapping[Precision, int]


@dataclass(frozen=True)
class Model:
    """Parts of a checkpoint that decide the cost of a pass."""

    body: Weights  # every layer, without embedding and output head
    head: Weights  # lm_head or the tied embedding
    drafter: Weights  # MTP head without what it shares with the model; empty without one
    draft_head: Weights | None  # of a trimmed draft vocabulary; None where drafts read `head`
    tied: bool  # whether the output head is the embedding
    embedding_bytes: int
    embedding_row_bytes: int
    attention_layers: int  # full attention, with a KV cache
    drafter_layers: int  # of the MTP head
    kv_bytes: int  # keys and values per token and layer
    attention_flops: int  # per query token, cached token and layer: QK and AV of all heads
    attention_precision: Precision  # that the dtype of the KV cache allows
    state_bytes: int  # recurrent and convolution states per sequence, all Gated DeltaNet layers
    state_flops: int  # per token on recurrent states, all Gated DeltaNet layers

    @property
    def draft_output(self) -> Weights:
        """The output head that a draft pass reads."""
        return self.draft_head or self.head

    def resident_bytes(self, num_speculative_tokens: int) -> int:
        """Bytes of weights in GPU memory."""
        embedding = 0 if self.tied else self.embedding_bytes
        drafter = self.drafter.bytes + (self.draft_head.bytes if self.draft_head else 0)
        return self.body.bytes + self.head.bytes + embedding + (drafter if num_speculative_tokens else 0)

    def sequence_bytes(self, context_len: int, num_speculative_tokens: int) -> int:
        """Bytes of KV cache and states of one sequence in GPU memory."""
        return self.cached_layers(num_speculative_tokens) * self.kv_bytes * context_len + self.state_bytes

    def cached_layers(self, num_speculative_tokens: int) -> int:
        """Number of layers with a KV cache; the MTP head has one only if it drafts."""
        return self.attention_layers + (self.drafter_layers if num_speculative_tokens else 0)

    def fitting_batch(
        self, gpu: GpuSheet, context_len: int, num_speculative_tokens: int, share: float = MEMORY_UTILIZATION
    ) -> int:
        """Sequences that fit beside the weights into a share of GPU memory; a RooflineError where not even one does."""
        weights = self.resident_bytes(num_speculative_tokens)
        sequence = self.sequence_bytes(context_len, num_speculative_tokens)
        fitting = int((share * gpu.memory_gib * 2**30 - weights) // sequence)
        if fitting < 1:
            raise RooflineError(
                f"weights and {context_len} tokens need {(weights + sequence) / 2**30:.1f} GiB, and vLLM may use "
                f"{share:.0%} of {gpu.name}'s {gpu.memory_gib:.0f} GiB; use a larger GPU or a smaller variant"
            )
        return fitting


class _TextShape(BaseModel):
    """Fields of a Qwen3.5 text config that give the size of KV cache and states."""

    layer_types: tuple[Literal["full_attention", "linear_attention"], ...]
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    linear_num_key_heads: PositiveInt
    linear_num_value_heads: PositiveInt
    linear_key_head_dim: PositiveInt
    linear_value_head_dim: PositiveInt
    linear_conv_kernel_dim: PositiveInt
    mamba_ssm_dtype: str | None = None


def read_model(
    tensors: Mapping[str, TensorInfo],
    config: Mapping[str, Any],
    *,
    kv_cache_dtype: str = "auto",
    state_dtype: str = "auto",
) -> Model:
    """The model of a checkpoint, from tensor shapes alone.

    Floating-point weights wider than 16 bits count as 16-bit, as vLLM serves them. Vision towers are not counted.

    Args:
        tensors: tensors by name, from `list_tensors`.
        config: config.json.
        kv_cache_dtype: value of vLLM's --kv-cache-dtype; auto is the config's kv_cache_scheme, else 16 bits.
        state_dtype: value of vLLM's --mamba-ssm-cache-dtype; auto is the config's mamba_ssm_dtype, else 16 bits.

    Raises:
        RooflineError: not a dense Qwen3.5 text model, no output head, or an unknown packing or dtype.
    """
    text = checkpoint.text_config(config)
    if "num_experts" in text:
        raise RooflineError("config.json has num_experts, and experts are not counted; use a dense model")
    try:
        shape = _TextShape.model_validate(text)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise RooflineError(f"config.json: {field}: {first['msg']}; use a Qwen3.5 model") from None
    form = checkpoint.quantisation(config)
    is_tied = bool(text.get("tie_word_embeddings"))
    embedding, head = _embedding_and_head(tensors, is_tied)
    others = [name for name in tensors if name not in {embedding, *head} and not _is_unread(name)]
    drafter = [name for name in others if name.startswith("mtp.") and not name.startswith(draft_head.PREFIX)]
    body = [name for name in others if not name.startswith("mtp.")]
    if kv_cache_dtype == "auto":
        scheme = form.get("kv_cache_scheme")
        kv_cache_dtype = "fp8" if scheme and scheme["num_bits"] == 8 else "bfloat16"
    kv_bytes = _number_bytes("a KV cache", kv_cache_dtype, _KV_BYTES)
    if state_dtype == "auto":
        state_dtype = shape.mamba_ssm_dtype or "bfloat16"
    state_bytes = _number_bytes("a recurrent state", state_dtype, _STATE_BYTES)
    linear_layers = shape.layer_types.count("linear_attention")
    state_numbers = shape.linear_num_value_heads * shape.linear_value_head_dim * shape.linear_key_head_dim
    conv_channels = (
        2 * shape.linear_num_key_heads * shape.linear_key_head_dim
        + shape.linear_num_value_heads * shape.linear_value_head_dim
    )
    conv_bytes = conv_channels * (shape.linear_conv_kernel_dim - 1) * SIXTEEN_BIT
    embedding_bytes = _served_bytes(tensors[embedding])

    def weights(names: Iterable[str]) -> Weights:
        return _weights({name: tensors[name] for name in names}, form)

    return Model(
        body=weights(body),
        head=weights(head),
        drafter=weights(drafter),
        draft_head=weights([draft_head.WEIGHT]) if draft_head.WEIGHT in tensors else None,
        tied=head == [embedding],
        embedding_bytes=embedding_bytes,
        embedding_row_bytes=embedding_bytes // tensors[embedding].shape[0],
        attention_layers=shape.layer_types.count("full_attention"),
        drafter_layers=len({name.split(".")[2] for name in drafter if name.startswith("mtp.layers.")}),
        kv_bytes=2 * shape.num_key_value_heads * shape.head_dim * kv_bytes,
        attention_flops=4 * shape.num_attention_heads * shape.head_dim,
        attention_precision="fp8" if kv_bytes == 1 else "bf16",
        state_bytes=linear_layers * (state_numbers * state_bytes + conv_bytes),
        state_flops=linear_layers * _STATE_FLOPS * state_numbers,
    )


def shape_tensors(shape: Shape) -> dict[str, TensorInfo]:
    """The tensors of a checkpoint that need not exist, from its dimensions; they have no bytes to read."""
    return {
        name: TensorInfo(dtype, size, Path(), 0, tensor_bytes(dtype, size))
        for name, (dtype, size) in shape.tensors.items()
    }


def shape_model(shape: Shape, *, kv_cache_dtype: str = "auto", state_dtype: str = "auto") -> Model:
    """The model of a checkpoint that need not exist, from its dimensions; dtypes and errors as for `read_model`."""
    return read_model(
        shape_tensors(shape), shape.config_json, kv_cache_dtype=kv_cache_dtype, state_dtype=state_dtype
    )


def _embedding_and_head(tensors: Mapping[str, TensorInfo], is_tied: bool) -> tuple[str, list[str]]:
    """Names of the embedding and of the output head's tensors: lm_head as stored, else the embedding."""
    embeddings = [
        name for name in tensors if name.endswith("embed_tokens.weight") and not name.startswith("mtp.")
    ]
    if len(embeddings) != 1:
        raise RooflineError(
            f"the checkpoint has {len(embeddings)} embed_tokens.weight instead of one; use a language model"
        )
    head = [
        name for name in tensors if name.startswith("lm_head.") and not name.endswith(("_shape", "_g_idx"))
    ]
    if not head and not is_tied:
        raise RooflineError(
            "the checkpoint has no lm_head, yet its config ties no embeddings; set tie_word_embeddings or add lm_head"
        )
    return embeddings[0], head or embeddings


def _is_unread(name: str) -> bool:
    """Whether no pass over text reads the tensor: vision tower, packing metadata, gathered embedding."""
    return "visual." in name or name.endswith(("_shape", "embed_tokens.weight"))


def _served_bytes(info: TensorInfo) -> int:
    """Bytes in GPU memory: floats wider than 16 bits are served in 16."""
    return info.elements * SIXTEEN_BIT if info.dtype in ("F32", "F64") else info.end - info.start


def _weights(tensors: Mapping[str, TensorInfo], form: Mapping[str, Any]) -> Weights:
    size = 0
    flops: dict[Precision, int] = {}
    for name, info in tensors.items():
        if name.endswith("qweight"):
            raise RooflineError(
                f"{name} is packed in AutoAWQ's or GPTQ's layout; use a compressed-tensors checkpoint"
            )
        size += _served_bytes(info)
        # One-dimensional tensors are norms and gates; scales and zero points belong to their packed weights.
        if len(info.shape) > 1 and name.endswith((".weight", ".weight_packed")):
            numbers = info.elements
            if name.endswith("_packed"):
                numbers = (info.end - info.start) * 8 // packed_bits(name.removesuffix(PACKED), form)
            precision = _PRECISIONS.get(info.dtype, "bf16")
            flops[precision] = flops.get(precision, 0) + 2 * numbers
    return Weights(size, flops)


def _number_bytes(what: str, dtype: str, known: Mapping[str, int]) -> int:
    if dtype not in known:
        raise RooflineError(f"{what} in {dtype} is not supported here; use {', '.join(known)}")
    return known[dtype]
