"""The dimensions of a checkpoint, without its weights: every tensor and the config.json that they make."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel, ConfigDict

from slimqwen.checkpoint import draft_head
from slimqwen.checkpoint.config import text_config, untied
from slimqwen.checkpoint.packing import UNPACKED_MTP, VISION_TOWER, config_group
from slimqwen.errors import SlimqwenError

Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""Name -> dtype as safetensors spells it, and shape."""


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
"""preprocessor_config.json of a multimodal Qwen3.5; vLLM's processor reads it even where images are off."""


class ShapeError(SlimqwenError):
    """No dimensions are known for a variant's checkpoint."""


class Packing(BaseModel):
    """Integer weights (compressed-tensors `pack-quantized`, symmetric).

    Attributes:
        bits: bits per weight.
        group_size: weights of a row that share a scale; None for one scale per row.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    bits: int
    group_size: int | None


@dataclass(frozen=True)
class Shape:
    """Dimensions of a checkpoint.

    Attributes:
        config: config.json of the unquantised model, a `text_config` in it.
        quantised: packing by kind of linear (`packing.LINEARS`).
        source: where the dimensions come from.
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
        """The same model with another number of rows in its embedding and output head."""
        text = {**self.text, "vocab_size": rows}
        return replace(self, config={**self.config, "text_config": text})

    def with_draft_vocabulary(self, rows: int) -> "Shape":
        """The same model with a draft head of so many rows."""
        return replace(self, config=draft_head.announced(self.config, rows))

    def with_packing(self, kinds: Mapping[str, Packing]) -> "Shape":
        """The same model with kinds of its linears (`packing.LINEARS`) packed; a packed output head is untied."""
        config = untied(self.config) if "lm_head" in kinds else self.config
        return replace(self, config=config, quantised={**self.quantised, **kinds})

    @property
    def _is_text_only(self) -> bool:
        """Whether config.json describes a language model without a vision tower."""
        return bool(self.config["architectures"][0].endswith("ForCausalLM"))

    @property
    def tensors(self) -> Tensors:
        """Every tensor of the checkpoint but the vision tower's."""
        text, quantised = self.text, self.quantised
        prefix = "model" if self._is_text_only else "model.language_model"
        hidden, rows = text["hidden_size"], text["vocab_size"]
        stored: Tensors = {f"{prefix}.embed_tokens.weight": ("BF16", (rows, hidden))}
        for layer, kind in enumerate(text["layer_types"]):
            name = f"{prefix}.layers.{layer}"
            stored |= _norms(name, hidden) | _mlp(f"{name}.mlp", text, quantised.get("mlp"))
            if kind == "full_attention":
                stored |= _attention(f"{name}.self_attn", text, quantised.get("attention"))
            else:
                stored |= _linear_attention(f"{name}.linear_attn", text, quantised.get("linear_attention"))
        stored[f"{prefix}.norm.weight"] = ("BF16", (hidden,))
        if not text["tie_word_embeddings"]:
            stored |= _linear("lm_head", rows, hidden, quantised.get("lm_head"))
        if text.get("mtp_num_hidden_layers"):
            stored |= {
                f"mtp.{name}.weight": ("BF16", (hidden,))
                for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
            }
            mtp = quantised.get("mtp")
            stored |= _linear("mtp.fc", hidden, 2 * hidden, mtp)
            stored |= _norms("mtp.layers.0", hidden) | _mlp("mtp.layers.0.mlp", text, mtp)
            stored |= _attention("mtp.layers.0.self_attn", text, mtp)
        if draft_rows := text.get(draft_head.SIZE_KEY):
            stored |= {
                draft_head.WEIGHT: ("BF16", (draft_rows, hidden)),
                draft_head.TOKEN_IDS: ("I64", (draft_rows,)),
            }
        return stored

    @property
    def config_json(self) -> dict[str, Any]:
        """config.json of the checkpoint, with its quantisation."""
        packed = {"quantization_config": _quantization(self.quantised)} if self.quantised else {}
        if self._is_text_only:
            flat = {key: value for key, value in self.config.items() if key != "text_config"}
            return {**flat, **self.text, **packed}
        return {**self.config, **packed}


def _quantization(quantised: Mapping[str, Packing]) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{number}": config_group(kind, packing.bits, packing.group_size)
            for number, (kind, packing) in enumerate(quantised.items())
        },
        "ignore": [
            *(() if "mtp" in quantised else (UNPACKED_MTP,)),
            VISION_TOWER,
            *(() if "lm_head" in quantised else ("lm_head",)),
        ],
    }


def _linear(name: str, rows: int, columns: int, packing: Packing | None) -> Tensors:
    if packing is None:
        return {f"{name}.weight": ("BF16", (rows, columns))}
    return {
        f"{name}.weight_packed": ("I32", (rows, columns * packing.bits // 32)),
        f"{name}.weight_scale": ("BF16", (rows, columns // (packing.group_size or columns))),
        f"{name}.weight_shape": ("I64", (2,)),
    }


def _norms(name: str, hidden: int) -> Tensors:
    kinds = ("input_layernorm", "post_attention_layernorm")
    return {f"{name}.{kind}.weight": ("BF16", (hidden,)) for kind in kinds}


def _mlp(name: str, text: Mapping[str, Any], packing: Packing | None) -> Tensors:
    hidden, inner = text["hidden_size"], text["intermediate_size"]
    return {
        **_linear(f"{name}.gate_proj", inner, hidden, packing),
        **_linear(f"{name}.up_proj", inner, hidden, packing),
        **_linear(f"{name}.down_proj", hidden, inner, packing),
    }


def _attention(name: str, text: Mapping[str, Any], packing: Packing | None) -> Tensors:
    hidden, dim = text["hidden_size"], text["head_dim"]
    heads, kv_heads = text["num_attention_heads"], text["num_key_value_heads"]
    return {
        **_linear(f"{name}.q_proj", 2 * heads * dim, hidden, packing),  # query and output gate
        **_linear(f"{name}.k_proj", kv_heads * dim, hidden, packing),
        **_linear(f"{name}.v_proj", kv_heads * dim, hidden, packing),
        **_linear(f"{name}.o_proj", hidden, heads * dim, packing),
        f"{name}.q_norm.weight": ("BF16", (dim,)),
        f"{name}.k_norm.weight": ("BF16", (dim,)),
    }


def _linear_attention(name: str, text: Mapping[str, Any], packing: Packing | None) -> Tensors:
    hidden = text["hidden_size"]
    keys, values = text["linear_num_key_heads"], text["linear_num_value_heads"]
    key_width, value_width = keys * text["linear_key_head_dim"], values * text["linear_value_head_dim"]
    channels = 2 * key_width + value_width
    return {
        **_linear(f"{name}.in_proj_qkv", channels, hidden, packing),
        **_linear(f"{name}.in_proj_z", value_width, hidden, packing),
        **_linear(f"{name}.in_proj_a", values, hidden, None),
        **_linear(f"{name}.in_proj_b", values, hidden, None),
        **_linear(f"{name}.out_proj", hidden, value_width, packing),
        f"{name}.conv1d.weight": ("BF16", (channels, 1, text["linear_conv_kernel_dim"])),
        f"{name}.A_log": ("F32", (values,)),
        f"{name}.dt_bias": ("BF16", (values,)),
        f"{name}.norm.weight": ("F32", (text["linear_value_head_dim"],)),
    }
