"""The dimensions of a checkpoint without its weights, and the tensors and config.json that follow from them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel, ConfigDict

from slimqwen.checkpoint import draft_head, packing
from slimqwen.checkpoint.config import text_config, untied
from slimqwen.checkpoint.packing import UNPACKED_MTP, VISION_TOWER
from slimqwen.errors import SlimqwenError
from slimqwen.formats.compressed_tensors import PackedIntegers, config_group, settings_of, with_group
from slimqwen.formats.format import Layout
from slimqwen.models.families import FULL_ATTENTION, Family, find_family

Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""Name of a tensor -> dtype as safetensors spells it, and shape."""


IMAGE_PROCESSOR: Mapping[str, Any] = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}
"""preprocessor_config.json of a multimodal Qwen3.5; vLLM's processor reads the file even if images are off."""


MTP_LAYERS = "mtp_num_hidden_layers"


class ShapeError(SlimqwenError):
    """The dimensions of a variant's checkpoint are not known."""


class Packing(BaseModel):
    """How integer weights are packed (compressed-tensors `pack-quantized`, symmetric).

    Attributes:
        bits: bits per weight.
        group_size: number of neighbouring weights of a row that share a scale; None for one scale per row.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    bits: int
    group_size: int | None

    @property
    def layout(self) -> PackedIntegers:
        """The layout of the weights."""
        return PackedIntegers(self.bits, self.group_size)


@dataclass(frozen=True)
class Shape:
    """Dimensions of a checkpoint.

    Attributes:
        config: config.json of the unquantised model, always with a `text_config`.
        quantised: kind of linears (`packing.LINEARS`) -> how they are packed.
        source: where the dimensions come from, in words.
    """

    config: Mapping[str, Any]
    quantised: Mapping[str, Packing]
    source: str

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> "Shape":
        """The dimensions of an unquantised checkpoint, from its config.json."""
        return cls({**config, "text_config": text_config(config)}, {}, "config.json")

    @property
    def text(self) -> Mapping[str, Any]:
        """The language model's part of the config."""
        return self.config["text_config"]  # type: ignore[no-any-return]

    def with_vocabulary(self, rows: int) -> "Shape":
        """The same model with `rows` rows in embedding and output head."""
        text = {**self.text, "vocab_size": rows}
        return replace(self, config={**self.config, "text_config": text})

    def with_draft_vocabulary(self, rows: int) -> "Shape":
        """The same model with a draft head of `rows` rows."""
        return replace(self, config=draft_head.announced(self.config, rows))

    def with_mtp_head(self) -> "Shape":
        """The same model with an MTP head, of as many layers as config.json announces, else of one."""
        text = {**self.text, MTP_LAYERS: self.text.get(MTP_LAYERS) or 1}
        return replace(self, config={**self.config, "text_config": text})

    def with_packing(self, kinds: Mapping[str, Packing]) -> "Shape":
        """The same model with these kinds (`packing.LINEARS`) packed; a packed embedding or lm_head is untied."""
        config = self.config if kinds.keys().isdisjoint(packing.TABLES) else untied(self.config)
        return replace(self, config=config, quantised={**self.quantised, **kinds})

    def with_outputs(self, outputs: object) -> "Shape":
        """The same shape: texts beside a checkpoint change no dimension."""
        return self

    @property
    def _is_text_only(self) -> bool:
        """Whether config.json describes a language model without a vision tower."""
        return bool(self.config["architectures"][0].endswith("ForCausalLM"))

    @property
    def _prefix(self) -> str:
        """Prefix of the names of the language model's tensors."""
        return "model" if self._is_text_only else "model.language_model"

    @property
    def tensors(self) -> Tensors:
        """Every tensor of the checkpoint, except those of a vision tower."""
        plain = _plain_tensors(self.text, find_family(self.config), self._prefix)
        if "experts" in self.quantised:
            plain = with_single_experts(plain)
        stored: Tensors = {}
        for name, (dtype, dimensions) in plain.items():
            kind = next((kind for kind in self.quantised if packing.is_linear(name, kind)), None)
            if kind is None:
                stored[name] = dtype, dimensions
            else:
                stored |= parts_of(name, dimensions, self.quantised[kind].layout)
        return stored

    @property
    def config_json(self) -> dict[str, Any]:
        """config.json of the checkpoint, with its quantization_config."""
        packed = {"quantization_config": _quantization(self.quantised)} if self.quantised else {}
        if self._is_text_only:
            flat = {key: value for key, value in self.config.items() if key != "text_config"}
            return {**flat, **self.text, **packed}
        return {**self.config, **packed}


def _quantization(quantised: Mapping[str, Packing]) -> dict[str, Any]:
    groups = {
        f"group_{number}": config_group(packing.LINEARS[kind], packed.bits, packed.group_size)
        for number, (kind, packed) in enumerate(quantised.items())
        if kind != "draft_head"  # a part of the MTP head, whose entry of `ignore` would match it
    }
    ignore = {"mtp": UNPACKED_MTP, "": VISION_TOWER, "lm_head": "lm_head"}
    form = settings_of(groups, [entry for kind, entry in ignore.items() if kind not in quantised])
    if packed := quantised.get("draft_head"):
        group = config_group(packing.LINEARS["draft_head"], packed.bits, packed.group_size)
        form = with_group(form, "draft_head", group, [draft_head.MODULE])
    return form


def with_first_experts(tensors: Tensors) -> Tensors:
    """Rename tensors of a mixture of experts: a linear of all experts of a layer gets the name of the first expert's.

    Its first dimension is the number of experts, so that sizes can be counted without tens of thousands of names.

    Args:
        tensors: tensors of the checkpoint, each linear of a layer's experts stored as one tensor.
    """
    split: Tensors = {}
    for name, (dtype, dimensions) in tensors.items():
        prefix, _, linear = name.rpartition(".experts.")
        if linear not in ("gate_up_proj", "down_proj"):
            split[name] = dtype, dimensions
            continue
        count, rows, columns = dimensions
        linears = ("gate_proj", "up_proj") if linear == "gate_up_proj" else (linear,)
        for each in linears:
            split[f"{prefix}.experts.0.{each}.weight"] = dtype, (count, rows // len(linears), columns)
    return split


def with_single_experts(tensors: Tensors) -> Tensors:
    """Split the tensors of a mixture of experts into one per expert and linear, as quantised checkpoints have them."""
    single: Tensors = {}
    for name, (dtype, dimensions) in with_first_experts(tensors).items():
        before, mark, linear = name.partition(".experts.0.")
        if not mark:
            single[name] = dtype, dimensions
            continue
        for expert in range(dimensions[0]):
            single[f"{before}.experts.{expert}.{linear}"] = dtype, dimensions[1:]
    return single


def parts_of(weight: str, dimensions: tuple[int, ...], layout: Layout) -> Tensors:
    """The tensors that store a quantised weight: name -> dtype and dimensions.

    Args:
        weight: name of the weight in 16 bits.
        dimensions: its dimensions; three if it holds all experts of a layer.
        layout: how it is packed.
    """
    *experts, rows, columns = dimensions
    module, parts = weight.removesuffix(".weight"), layout.parts(rows, columns).items()
    return {f"{module}.{part}": (dtypes[0], (*experts, *size)) for part, (size, dtypes) in parts}


def _plain_tensors(text: Mapping[str, Any], family: Family, prefix: str) -> Tensors:
    hidden, rows = text["hidden_size"], text["vocab_size"]
    plain: Tensors = {f"{prefix}.embed_tokens.weight": ("BF16", (rows, hidden))}
    layers = [(f"{prefix}.layers.{number}", kind) for number, kind in enumerate(family.layer_types(text))]
    drafts = text.get(MTP_LAYERS) or 0
    for name, kind in (*layers, *((f"mtp.layers.{number}", FULL_ATTENTION) for number in range(drafts))):
        plain |= {
            f"{name}.{norm}.weight": ("BF16", (hidden,))
            for norm in ("input_layernorm", "post_attention_layernorm")
        }
        plain |= _experts(name, text) if family.has_experts else _mlp(f"{name}.mlp", hidden, text)
        if kind == FULL_ATTENTION:
            plain |= _attention(f"{name}.self_attn", text, family)
        else:
            plain |= _linear_attention(f"{name}.linear_attn", text)
    plain[f"{prefix}.norm.weight"] = ("BF16", (hidden,))
    if not text.get("tie_word_embeddings"):
        plain |= _linear("lm_head", rows, hidden)
    if drafts:
        norms = ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
        plain |= {f"mtp.{name}.weight": ("BF16", (hidden,)) for name in norms}
        plain |= _linear("mtp.fc", hidden, 2 * hidden)
    if draft_rows := text.get(draft_head.SIZE_KEY):
        plain[draft_head.WEIGHT] = ("BF16", (draft_rows, hidden))
        plain[draft_head.TOKEN_IDS] = ("I64", (draft_rows,))
    return plain


def _linear(name: str, rows: int, columns: int) -> Tensors:
    return {f"{name}.weight": ("BF16", (rows, columns))}


def _mlp(name: str, hidden: int, text: Mapping[str, Any], inner: str = "intermediate_size") -> Tensors:
    return {
        **_linear(f"{name}.gate_proj", text[inner], hidden),
        **_linear(f"{name}.up_proj", text[inner], hidden),
        **_linear(f"{name}.down_proj", hidden, text[inner]),
    }


def _experts(layer: str, text: Mapping[str, Any]) -> Tensors:
    hidden, inner, count = text["hidden_size"], text["moe_intermediate_size"], text["num_experts"]
    return {
        **_linear(f"{layer}.mlp.gate", count, hidden),
        f"{layer}.mlp.experts.gate_up_proj": ("BF16", (count, 2 * inner, hidden)),
        f"{layer}.mlp.experts.down_proj": ("BF16", (count, hidden, inner)),
        **_mlp(f"{layer}.mlp.shared_expert", hidden, text, "shared_expert_intermediate_size"),
        **_linear(f"{layer}.mlp.shared_expert_gate", 1, hidden),
    }


def _attention(name: str, text: Mapping[str, Any], family: Family) -> Tensors:
    hidden, dim = text["hidden_size"], text["head_dim"]
    heads, kv_heads = text["num_attention_heads"], text["num_key_value_heads"]
    sizes = {
        "q_proj": ((1 + family.has_query_gate) * heads * dim, hidden),
        "k_proj": (kv_heads * dim, hidden),
        "v_proj": (kv_heads * dim, hidden),
        "o_proj": (hidden, heads * dim),
    }
    biased = sizes if text.get("attention_bias") else family.biased
    norms = ("q_norm", "k_norm") if family.has_head_norms else ()
    return {
        **{f"{name}.{linear}.weight": ("BF16", size) for linear, size in sizes.items()},
        **{f"{name}.{linear}.bias": ("BF16", sizes[linear][:1]) for linear in biased},
        **{f"{name}.{norm}.weight": ("BF16", (dim,)) for norm in norms},
    }


def _linear_attention(name: str, text: Mapping[str, Any]) -> Tensors:
    hidden = text["hidden_size"]
    keys, values = text["linear_num_key_heads"], text["linear_num_value_heads"]
    key_width, value_width = keys * text["linear_key_head_dim"], values * text["linear_value_head_dim"]
    channels = 2 * key_width + value_width
    return {
        **_linear(f"{name}.in_proj_qkv", channels, hidden),
        **_linear(f"{name}.in_proj_z", value_width, hidden),
        **_linear(f"{name}.in_proj_a", values, hidden),
        **_linear(f"{name}.in_proj_b", values, hidden),
        **_linear(f"{name}.out_proj", hidden, value_width),
        f"{name}.conv1d.weight": ("BF16", (channels, 1, text["linear_conv_kernel_dim"])),
        f"{name}.A_log": ("F32", (values,)),
        f"{name}.dt_bias": ("BF16", (values,)),
        f"{name}.norm.weight": ("F32", (text["linear_value_head_dim"],)),
    }
