"""Architecture of a checkpoint: bytes of its parts and their FLOPs per token, computed from tensor shapes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, NonNegativeInt, PositiveInt, ValidationError

from slimqwen import checkpoint
from slimqwen.checkpoint import draft_head
from slimqwen.checkpoint.tensors import TensorInfo, find_output_head, tensor_bytes
from slimqwen.checkpoint.weights import Weight, group_parts
from slimqwen.fit import FitError
from slimqwen.formats.format import Precision
from slimqwen.models.families import FULL_ATTENTION, LINEAR_ATTENTION, find_family
from slimqwen.models.shape import Shape, Tensors

SIXTEEN_BIT = 2
"""Bytes per number in the dtype that vLLM computes in, float16 or bfloat16."""

BLOCK_TOKENS = 16
"""vLLM's default of --block-size, tokens; a model with states has blocks of a multiple of it."""

_EXPORT_TOKENS = 64
"""Multiple of tokens at which FlashInfer's prompt kernel of Gated DeltaNet exports states."""

_STATE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_KV_BYTES = {"float16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1} | {
    "int8_per_token_head": 1,
    "fp8_per_token_head": 1,
    "int4_per_token_head": 0.5,
}
_SCALED_PER_HEAD = "_per_token_head"
_HEAD_SCALE_BYTES = 4  # a float32 beside the keys, and one beside the values, of each token and head

_STATE_FLOPS = 6
"""FLOPs per token and number of the recurrent state: one multiply-add each for key read, update and query read."""


@dataclass(frozen=True)
class Weights:
    """Weights that a forward pass reads: their bytes, and FLOPs per token by precision.

    Attributes:
        bytes: stored size of all the weights.
        flops: precision -> FLOPs per token.
        expert_bytes: the part of `bytes` that belongs to routed experts.
        expert_share: share of the routed experts that one token is sent to.
    """

    bytes: int
    flops: Mapping[Precision, int]
    expert_bytes: int = 0
    expert_share: float = 1.0

    def read_bytes(self, tokens: int) -> float:
        """Expected bytes that a pass over `tokens` tokens reads, if each token goes to experts independently."""
        return self.bytes - self.expert_bytes * (1 - self.expert_share) ** tokens


@dataclass(frozen=True)
class Model:
    """Bytes and FLOPs of a checkpoint's parts, which decide what a forward pass costs."""

    body: Weights  # every layer, without embedding and output head
    head: Weights  # lm_head or the tied embedding
    drafter: Weights  # MTP head without the weights that it shares with the model; empty without an MTP head
    draft_head: Weights | None  # rows of a trimmed draft vocabulary; None where drafts read `head`
    draft_ids_bytes: int  # token ids of these rows, of which a step reads only those that it drafts
    tied: bool  # whether the output head is the embedding
    embedding_bytes: int
    embedding_row_bytes: int
    attention_layers: int  # number of full-attention layers, which have a KV cache
    drafter_layers: int  # number of layers of the MTP head
    kv_bytes: int  # keys and values per token and layer
    attention_flops: int  # per query token, cached token and layer: QK and AV of all heads
    attention_precision: Precision  # of the attention products, as the dtype of the KV cache allows
    linear_layers: int  # number of Gated DeltaNet layers
    state_bytes: int  # recurrent and convolution states per sequence, all Gated DeltaNet layers
    conv_row_bytes: int  # row of one token in the convolution state of one layer
    state_flops: int  # per token on recurrent states, all Gated DeltaNet layers
    linear_key_head_dim: int  # of a Gated DeltaNet layer; 0 without any

    @property
    def draft_output(self) -> Weights:
        """The output head that a draft pass reads."""
        return self.draft_head or self.head

    def resident_bytes(self, num_speculative_tokens: int) -> int:
        """Bytes of weights in GPU memory; those of the MTP head count only if it drafts.

        Args:
            num_speculative_tokens: drafted tokens of a step (K); 0 without drafts.
        """
        embedding = 0 if self.tied else self.embedding_bytes
        drafter = (
            self.drafter.bytes + (self.draft_head.bytes if self.draft_head else 0) + self.draft_ids_bytes
        )
        return self.body.bytes + self.head.bytes + embedding + (drafter if num_speculative_tokens else 0)

    def cached_layers(self, num_speculative_tokens: int) -> int:
        """Number of layers that have a KV cache; those of the MTP head count only if it drafts.

        Args:
            num_speculative_tokens: drafted tokens of a step (K); 0 without drafts.
        """
        return self.attention_layers + (self.drafter_layers if num_speculative_tokens else 0)


@dataclass(frozen=True)
class CacheLayout:
    """The blocks in which vLLM allocates the memory of KV cache and states.

    vLLM has pages of one size for all layers: a page of keys and values is made as large as the states of one Gated
    DeltaNet layer. Layers form groups of as many as there are layers with keys and values, and a block has a page for
    each layer of a group. The arithmetic is that of vLLM's kv_cache_utils, so results agree with plans.

    Attributes:
        block_size: tokens whose keys and values a block holds.
        block_bytes: bytes of a block.
        state_blocks: blocks that a sequence takes for its states, whatever its length.
    """

    block_size: int
    block_bytes: int
    state_blocks: int

    def sequence_blocks(self, context_len: int) -> int:
        """Number of blocks of a sequence of `context_len` tokens."""
        return -(-context_len // self.block_size) + self.state_blocks

    def sequence_bytes(self, context_len: int) -> int:
        """Bytes of the blocks of a sequence of `context_len` tokens."""
        return self.sequence_blocks(context_len) * self.block_bytes


def lay_out_cache(
    model: Model,
    num_speculative_tokens: int,
    *,
    prefix_caching: bool = False,
    flashinfer_prefill: bool = False,
) -> CacheLayout:
    """Lay out the cache of a model in blocks.

    Args:
        model: the model, or the part of it that one GPU holds.
        num_speculative_tokens: drafted tokens of a step (K); 0 without drafts.
        prefix_caching: whether the states at the end of blocks are kept for later requests (vLLM's mode `align`).
        flashinfer_prefill: whether FlashInfer computes the prompts of Gated DeltaNet layers. For later requests its
            kernel exports states in the middle of a prompt, at multiples of 64 tokens, into a block of their own.
    """
    layers, block_size, state_blocks = model.cached_layers(num_speculative_tokens), BLOCK_TOKENS, 0
    exports = prefix_caching and flashinfer_prefill
    if model.linear_layers:
        # The convolution state has one more row for each drafted token, so that a rejected token can be taken back.
        page = model.state_bytes // model.linear_layers + num_speculative_tokens * model.conv_row_bytes
        grid = _EXPORT_TOKENS if exports else BLOCK_TOKENS
        block_size = grid * -(-page // (grid * model.kv_bytes))
        states = 1 + num_speculative_tokens + prefix_caching + exports
        state_blocks = states * -(-model.linear_layers // layers)
    return CacheLayout(block_size, layers * block_size * model.kv_bytes, state_blocks)


class _TextShape(BaseModel):
    """Fields of a text config that give the sizes of KV cache and states; without Gated DeltaNet, `linear_*` are 0."""

    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    linear_num_key_heads: NonNegativeInt = 0
    linear_num_value_heads: NonNegativeInt = 0
    linear_key_head_dim: NonNegativeInt = 0
    linear_value_head_dim: NonNegativeInt = 0
    linear_conv_kernel_dim: PositiveInt = 1
    mamba_ssm_dtype: str | None = None


def read_model(
    tensors: Mapping[str, TensorInfo],
    config: Mapping[str, Any],
    *,
    kv_cache_dtype: str = "auto",
    state_dtype: str = "auto",
) -> Model:
    """Compute bytes and FLOPs of a checkpoint's parts from tensor shapes alone.

    Floating-point weights wider than 16 bits count as 16-bit, as vLLM serves them. Vision towers are not counted.

    Args:
        tensors: tensors by name, from `list_tensors`.
        config: config.json.
        kv_cache_dtype: value of vLLM's --kv-cache-dtype; auto is the config's kv_cache_scheme, else 16 bits.
        state_dtype: value of vLLM's --mamba-ssm-cache-dtype; auto is the config's mamba_ssm_dtype, else 16 bits.

    Raises:
        FamilyError: the model is of no supported family.
        FitError: config.json is unusable, the output head is missing, or a packing or dtype is unknown.
    """
    text, family = checkpoint.text_config(config), find_family(config)
    try:
        shape = _TextShape.model_validate(text)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise FitError(f"config.json: {field}: {first['msg']}; correct it") from None
    form = checkpoint.quantisation(config)
    is_tied = bool(text.get("tie_word_embeddings"))
    stored = group_parts(tensors, form)
    embedding, head = _embedding_and_head(stored, is_tied)
    others = [name for name in stored if name not in {embedding, head} and not _is_unread(name)]
    drafter = [name for name in others if name.startswith("mtp.") and not name.startswith(draft_head.PREFIX)]
    body = [name for name in others if not name.startswith("mtp.")]
    if kv_cache_dtype == "auto":
        scheme = form.get("kv_cache_scheme")
        kv_cache_dtype = "fp8" if scheme and scheme["num_bits"] == 8 else "bfloat16"
    kv_number_bytes = _number_bytes("a KV cache", kv_cache_dtype, _KV_BYTES)
    has_head_scales = kv_cache_dtype.endswith(_SCALED_PER_HEAD)
    head_bytes = int(shape.head_dim * kv_number_bytes) + has_head_scales * _HEAD_SCALE_BYTES
    if state_dtype == "auto":
        state_dtype = shape.mamba_ssm_dtype or "bfloat16"
    state_bytes = int(_number_bytes("a recurrent state", state_dtype, _STATE_BYTES))
    layer_types = family.layer_types(text)
    linear_layers = layer_types.count(LINEAR_ATTENTION)
    state_numbers = shape.linear_num_value_heads * shape.linear_value_head_dim * shape.linear_key_head_dim
    conv_channels = (
        2 * shape.linear_num_key_heads * shape.linear_key_head_dim
        + shape.linear_num_value_heads * shape.linear_value_head_dim
    )
    conv_bytes = conv_channels * (shape.linear_conv_kernel_dim - 1) * SIXTEEN_BIT
    expert_share = text["num_experts_per_tok"] / text["num_experts"] if family.has_experts else 1.0
    embedding_bytes = _served_bytes(stored[embedding])

    def weights(names: Iterable[str]) -> Weights:
        return _weights([stored[name] for name in names], expert_share)

    return Model(
        body=weights(body),
        head=weights([head]),
        drafter=weights(drafter),
        draft_head=weights([draft_head.WEIGHT]) if draft_head.WEIGHT in stored else None,
        draft_ids_bytes=_served_bytes(stored[draft_head.TOKEN_IDS]) if draft_head.TOKEN_IDS in stored else 0,
        tied=head == embedding,
        embedding_bytes=embedding_bytes,
        embedding_row_bytes=embedding_bytes // stored[embedding].carrier.shape[0],
        attention_layers=layer_types.count(FULL_ATTENTION),
        drafter_layers=len({name.split(".")[2] for name in drafter if name.startswith("mtp.layers.")}),
        kv_bytes=2 * shape.num_key_value_heads * head_bytes,
        attention_flops=4 * shape.num_attention_heads * shape.head_dim,
        # With a scale for each head, keys and values are widened before the products.
        attention_precision="fp8" if kv_number_bytes == 1 and not has_head_scales else "bf16",
        linear_layers=linear_layers,
        state_bytes=linear_layers * (state_numbers * state_bytes + conv_bytes),
        conv_row_bytes=conv_channels * SIXTEEN_BIT,
        state_flops=linear_layers * _STATE_FLOPS * state_numbers,
        linear_key_head_dim=shape.linear_key_head_dim,
    )


def shape_tensors(tensors: Tensors) -> dict[str, TensorInfo]:
    """Describe tensors of a checkpoint that need not exist: name, dtype and shape, without a file to read."""
    return {
        name: TensorInfo(dtype, size, Path(), 0, tensor_bytes(dtype, size))
        for name, (dtype, size) in tensors.items()
    }


def shape_model(shape: Shape, *, kv_cache_dtype: str = "auto", state_dtype: str = "auto") -> Model:
    """Compute bytes and FLOPs of a checkpoint's parts from published dimensions; the checkpoint need not exist.

    Args:
        shape: dimensions and config.json of the checkpoint.
        kv_cache_dtype: value of vLLM's --kv-cache-dtype; auto is the config's kv_cache_scheme, else 16 bits.
        state_dtype: value of vLLM's --mamba-ssm-cache-dtype; auto is the config's mamba_ssm_dtype, else 16 bits.

    Raises:
        FamilyError: the model is of no supported family.
        FitError: config.json is unusable, the output head is missing, or a packing or dtype is unknown.
    """
    tensors = shape_tensors(shape.tensors)
    return read_model(tensors, shape.config_json, kv_cache_dtype=kv_cache_dtype, state_dtype=state_dtype)


def _embedding_and_head(stored: Mapping[str, Weight], is_tied: bool) -> tuple[str, str]:
    """Names of the embedding and of the output head: lm_head if it is stored, else the embedding."""
    embeddings = [
        name for name in stored if name.endswith("embed_tokens.weight") and not name.startswith("mtp.")
    ]
    if len(embeddings) != 1:
        raise FitError(
            f"the checkpoint has {len(embeddings)} tensors embed_tokens.weight instead of one; use a language model"
        )
    head = find_output_head(stored)[0]
    if head == embeddings[0] and not is_tied:
        raise FitError(
            "the checkpoint has no lm_head, but its config.json does not tie it to the embedding; "
            "set tie_word_embeddings to true or use a checkpoint with lm_head"
        )
    return embeddings[0], head


def _is_unread(name: str) -> bool:
    """Whether passes over text do not read the weight: of a vision tower, or a gathered embedding."""
    return "visual." in name or name.endswith("embed_tokens.weight")


def _served_bytes(weight: Weight) -> int:
    """Bytes in GPU memory: floats wider than 16 bits are served in 16; the stored shape of a packed weight is not."""
    return sum(
        info.elements * SIXTEEN_BIT if info.dtype in ("F32", "F64") else info.end - info.start
        for part, info in weight.parts.items()
        if part != "weight_shape"
    )


def _weights(weights: Iterable[Weight], expert_share: float) -> Weights:
    size = expert_bytes = 0
    flops: dict[Precision, int] = {}
    for weight in weights:
        is_expert = ".experts." in weight.name
        size += _served_bytes(weight)
        expert_bytes += is_expert * _served_bytes(weight)
        # One-dimensional tensors are norms and gates.
        if len(weight.carrier.shape) > 1 and (is_expert or weight.name.endswith(".weight")):
            layout, elements = weight.layout, weight.carrier.elements
            if weight.is_quantised and layout is None:
                raise FitError(
                    f"config.json does not say how {weight.name} is stored ({weight.carrier.dtype}); correct its "
                    "quantization_config"
                )
            precision: Precision = layout.precision if layout else "bf16"
            numbers = layout.count(elements) if layout else elements
            share = expert_share if is_expert else 1
            flops[precision] = flops.get(precision, 0) + round(2 * share * numbers)
    return Weights(size, flops, expert_bytes, expert_share)


def _number_bytes(what: str, dtype: str, known: Mapping[str, float]) -> float:
    if dtype not in known:
        raise FitError(f"{what} in {dtype} is not supported here; use {', '.join(known)}")
    return known[dtype]
