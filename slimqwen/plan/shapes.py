"""Checkpoints without weights: config.json and a sparse safetensors file that vLLM can build a model from.

The dimensions are a published config (eval/shapes/<name>.json), or that of a checkpoint that is there, and what the
stages of a variant's recipe do to them.
"""

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from slimqwen import checkpoint
from slimqwen import variant as variants
from slimqwen.checkpoint import draft_head
from slimqwen.checkpoint.packing import LINEARS, UNPACKED_MTP
from slimqwen.errors import SlimqwenError
from slimqwen.variant import Variant

FOLDER = Path("eval") / "shapes"
"""Relative to the repository."""

_BITS = {"BF16": 16, "F32": 32, "I32": 32, "I64": 64}
_PREFIX = "model.language_model"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)
# vLLM's processor of a multimodal Qwen3.5 reads these even where images are off.
_PREPROCESSOR = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}

Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""Name -> dtype as safetensors spells it, and shape."""


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


class _Published(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str
    config: dict[str, Any] | None = None
    base: str | None = None
    quantised: dict[str, Packing] = {}


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

    @property
    def text(self) -> Mapping[str, Any]:
        """The language model's part of the config."""
        return self.config["text_config"]  # type: ignore[no-any-return]

    def with_vocabulary(self, rows: int) -> "Shape":
        """The same model with another number of rows in its embedding and output head."""
        text = {**self.text, "vocab_size": rows}
        return replace(self, config={**self.config, "text_config": text})


def published_shape(root: Path, name: str) -> Shape | None:
    """The dimensions in eval/shapes/<name>.json, None where there is no such file.

    Raises:
        ShapeError: the file breaks its schema.
    """
    file = root / FOLDER / f"{name}.json"
    if not file.is_file():
        return None
    try:
        content = _Published.model_validate_json(file.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        reason = f"{'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}"
        raise ShapeError(f"{FOLDER / file.name}: {reason}; `git checkout` restores it") from None
    if content.config is not None:
        return Shape(content.config, content.quantised, content.source)
    base = published_shape(root, content.base) if content.base else None
    if base is None:
        raise ShapeError(f"{FOLDER / file.name}: neither config nor a base in {FOLDER}")
    return Shape(base.config, {**base.quantised, **content.quantised}, content.source)


def variant_shape(variant: Variant) -> Shape:
    """The dimensions of the checkpoint that a variant serves, from published ones and recipes.

    Raises:
        ShapeError: the checkpoint is not published, not on this machine, and not made by a recipe from one that is.
    """
    return shape_by_stage(variant)[-1][1]


def shape_by_stage(variant: Variant) -> list[tuple[str, Shape]]:
    """The name and dimensions of the published checkpoint, then each stage of the recipes with those after it.

    Raises:
        ShapeError: as for `variant_shape`.
    """
    name = variant.weights.name
    shape = published_shape(variant.root, name)
    if shape is not None:
        return [(name, shape)]
    maker = _maker(variant, name)
    if maker is None:
        return [(name, _present_shape(variant.weights))]
    assert maker.recipe is not None
    recipe = yaml.safe_load(maker.recipe.read_text(encoding="utf-8"))
    by_stage = shape_by_stage(variants.load(str(recipe["base"]), variant.root))
    shape = by_stage[-1][1]
    for step in recipe["stages"]:
        ((stage, parameters),) = step.items() if isinstance(step, dict) else ((step, {}),)
        shape = after_stage(shape, stage, parameters or {})
        by_stage.append((stage, shape))
    by_stage[-1] = (by_stage[-1][0], replace(shape, source=f"{shape.source}; {maker.name}/recipe.yaml"))
    return by_stage


def _maker(variant: Variant, name: str) -> Variant | None:
    """The variant whose recipe makes a checkpoint; None without one."""
    if variant.recipe and variant.name == name:
        return variant
    maker = variants.load(name, variant.root) if name in variants.names(variant.root) else None
    return maker if maker and maker.recipe else None


def _present_shape(weights: Path) -> Shape:
    """The dimensions of an unquantised checkpoint on this machine.

    Raises:
        ShapeError: there is none.
    """
    if (weights / "config.json").is_file():
        config = checkpoint.read_config(weights)
        if "quantization_config" not in config:
            dimensions = {**config, "text_config": checkpoint.text_config(config)}
            return Shape(dimensions, {}, f"weights/{weights.name}/config.json")
    raise ShapeError(
        f"the dimensions of weights/{weights.name} are not known: no unquantised checkpoint of that name is on this "
        f"machine, {FOLDER}/{weights.name}.json does not exist, and no recipe makes it"
    )


def of_config(config: Mapping[str, Any]) -> Shape:
    """The dimensions of an unquantised checkpoint, from its config.json."""
    text = config.get("text_config", config)
    return Shape({**config, "text_config": text}, {}, "config.json")


def after_stage(shape: Shape, stage: str, parameters: Mapping[str, Any]) -> Shape:
    """What a stage of a recipe does to dimensions; most do nothing."""
    group_size = int(parameters.get("group_size", 32))
    if stage == "prune_vocab":
        return shape.with_vocabulary(int(parameters["size"]))
    if stage == "calibrate":
        return replace(shape, quantised={**shape.quantised, **_calibrated(parameters, group_size)})
    if stage == "round_linears":
        if parameters.get("scheme", "W4A16") != "W4A16":
            raise ShapeError("8-bit activations are not planned without weights; run the recipe first")
        packing = Packing(bits=4, group_size=group_size)
        return replace(
            shape, quantised={**shape.quantised, **dict.fromkeys(parameters.get("targets", ["mlp"]), packing)}
        )
    if stage == "first_rows":
        shape = shape.with_vocabulary(int(parameters.get("vocab_size") or shape.text["vocab_size"]))
        drafted = parameters.get("draft_vocab_size")
        return replace(shape, config=draft_head.announced(shape.config, int(drafted))) if drafted else shape
    if stage == "trim_draft_vocab":
        return replace(shape, config=draft_head.announced(shape.config, int(parameters["size"])))
    if stage == "quantise_lm_head":
        packed = {**shape.quantised, "lm_head": Packing(bits=4, group_size=group_size)}
        untied = {
            **shape.config,
            "tie_word_embeddings": False,
            "text_config": {**shape.text, "tie_word_embeddings": False},
        }
        return replace(shape, config=untied, quantised=packed)
    return shape


def _calibrated(parameters: Mapping[str, Any], group_size: int) -> dict[str, Packing]:
    """What the stage `calibrate` packs: a list of kinds with one scheme, or a scheme for each kind."""
    targets = parameters.get("targets", ["mlp"])
    schemes = (
        targets if isinstance(targets, Mapping) else dict.fromkeys(targets, parameters.get("scheme", "W4A16"))
    )
    return {
        kind: Packing(bits=8, group_size=None)
        if scheme == "W8A16"
        else Packing(bits=4, group_size=group_size)
        for kind, scheme in schemes.items()
        if scheme != "none"
    }


def tensors(shape: Shape) -> Tensors:
    """Every tensor of the checkpoint but the vision tower's."""
    text, quantised = shape.text, shape.quantised
    hidden, rows = text["hidden_size"], text["vocab_size"]
    stored: Tensors = {f"{_PREFIX}.embed_tokens.weight": ("BF16", (rows, hidden))}
    for layer, kind in enumerate(text["layer_types"]):
        name = f"{_PREFIX}.layers.{layer}"
        stored |= _norms(name, hidden) | _mlp(f"{name}.mlp", text, quantised.get("mlp"))
        if kind == "full_attention":
            stored |= _attention(f"{name}.self_attn", text, quantised.get("attention"))
        else:
            stored |= _linear_attention(f"{name}.linear_attn", text, quantised.get("linear_attention"))
    stored[f"{_PREFIX}.norm.weight"] = ("BF16", (hidden,))
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


def write(shape: Shape, folder: Path, tokenizer: Path) -> int:
    """Write a checkpoint of these dimensions, all zeros in a sparse file.

    Args:
        folder: made; must not exist.
        tokenizer: folder whose tokenizer files are taken; ids above its size are never asked for.

    Returns:
        Bytes of the tensors; on disk there are a few hundred kilobytes.
    """
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config_of(shape), indent=1) + "\n")
    (folder / "preprocessor_config.json").write_text(json.dumps(_PREPROCESSOR) + "\n")
    for name in _TOKENIZER_FILES:
        shutil.copyfile(tokenizer / name, folder / name)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (dtype, dimensions) in tensors(shape).items():
        end = position + tensor_bytes(dtype, dimensions)
        header[name] = {"dtype": dtype, "shape": list(dimensions), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + position)
    return position


def config_of(shape: Shape) -> dict[str, Any]:
    """config.json of the checkpoint."""
    packed = {"quantization_config": _quantization(shape.quantised)} if shape.quantised else {}
    return {**shape.config, **packed}


def tensor_bytes(dtype: str, dimensions: tuple[int, ...]) -> int:
    """Bytes of a stored tensor.

    Args:
        dtype: as safetensors spells it.
        dimensions: its shape.
    """
    return math.prod(dimensions) * _BITS[dtype] // 8


def _quantization(quantised: Mapping[str, Packing]) -> dict[str, Any]:
    """A compressed-tensors configuration, as llmcompressor writes it."""
    groups = {}
    for number, (kind, packing) in enumerate(quantised.items()):
        weights: dict[str, Any] = {
            "num_bits": packing.bits,
            "group_size": packing.group_size,
            "strategy": "channel" if packing.group_size is None else "group",
            "symmetric": True,
            "type": "int",
            "dynamic": False,
            "actorder": None,
            "block_structure": None,
            "observer": "mse",
            "observer_kwargs": {},
        }
        groups[f"group_{number}"] = {
            "targets": [LINEARS[kind]],
            "weights": weights,
            "input_activations": None,
            "output_activations": None,
            "format": "pack-quantized",
        }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [
            *(() if "mtp" in quantised else (UNPACKED_MTP,)),
            "re:.*visual.*",
            *(() if "lm_head" in quantised else ("lm_head",)),
        ],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
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
