"""config.json of a checkpoint: reading, writing, and the tensors that it promises."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slimqwen.checkpoint import draft_head
from slimqwen.checkpoint.errors import CorruptCheckpointError

RANDOM_WEIGHTS = "random_weights_seed"
"""Key of config.json: the weights are random, drawn with this seed. They answer for speed and memory only."""

ExpectedTensors = dict[str, tuple[tuple[int, ...], tuple[str, ...]]]
"""Tensor name -> its shape and the dtypes it may have."""


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json.

    Raises:
        CorruptCheckpointError: it is missing, is not a JSON object, or names no architecture.
    """
    config = read_json_object(folder / "config.json")
    if not isinstance(config.get("architectures"), list) or not config["architectures"]:
        raise CorruptCheckpointError(f"{folder / 'config.json'} names no architecture")
    return config


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write config.json, its keys in the order given."""
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config: `text_config` of a multimodal model, else the whole."""
    part: Mapping[str, Any] = config.get("text_config", config)
    return part


def untied(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config, its text part too, whose output head is not tied to the embedding."""
    changed = {**config, "tie_word_embeddings": False}
    if "text_config" in config:
        changed["text_config"] = {**config["text_config"], "tie_word_embeddings": False}
    return changed


def has_random_weights(folder: Path) -> bool:
    """Whether a checkpoint's weights were drawn at random, so that its answers mean nothing."""
    return RANDOM_WEIGHTS in text_config(read_config(folder))


def read_json_object(file: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
        CorruptCheckpointError: it is missing or holds something else.
    """
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise CorruptCheckpointError(f"{file} is missing") from None
    except ValueError as error:
        raise CorruptCheckpointError(f"{file} is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise CorruptCheckpointError(f"{file} is not a JSON object")
    return content


def expected_tensors(folder: Path) -> ExpectedTensors:
    """The tensors that config.json promises, from the model class that it names, built on the meta device.

    Raises:
        CorruptCheckpointError: config.json is unusable, or transformers has no such model class.
    """
    # Slow to import, and only `checkpoint.verify` needs them.
    import torch
    import transformers
    from compressed_tensors.utils import is_match

    config = read_config(folder)
    architecture = config["architectures"][0]
    if not hasattr(transformers, architecture):
        raise CorruptCheckpointError(f"{folder / 'config.json'}: transformers has no {architecture}")
    settings = transformers.AutoConfig.from_pretrained(folder)
    # The class is built without quantisation; the packed form of its linears is worked out below.
    settings.__dict__.pop("quantization_config", None)
    with torch.device("meta"):
        model = getattr(transformers, architecture)(settings)
    text = text_config(config)
    declared = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or "float32"
    floating = tuple(dict.fromkeys(({"bfloat16": "BF16", "float16": "F16"}.get(declared, "F32"), "F32")))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)):
        shapes.pop("lm_head.weight", None)
    shapes |= _mtp_shapes(text, shapes)
    expected: ExpectedTensors = {name: (shape, floating) for name, shape in shapes.items()}
    if rows := text.get(draft_head.SIZE_KEY):
        expected[draft_head.WEIGHT] = ((rows, text["hidden_size"]), floating)
        expected[draft_head.TOKEN_IDS] = ((rows,), ("I64",))
    quantization = config.get("quantization_config", {})
    modules = dict(model.named_modules())
    # The model class has no MTP head; its matrices are linears.
    linear = torch.nn.Linear(1, 1, device="meta")
    modules |= {
        name.removesuffix(".weight"): linear
        for name, shape in shapes.items()
        if name.startswith("mtp.") and len(shape) == 2
    }
    # A target that names a module goes before one of its class.
    groups = sorted(
        quantization.get("config_groups", {}).values(), key=lambda group: "Linear" in group["targets"]
    )
    for group in groups:
        for name, module in modules.items():
            if f"{name}.weight" in expected and any(
                is_match(name, module, target, quantization.get("ignore", [])) for target in group["targets"]
            ):
                shape, _ = expected.pop(f"{name}.weight")
                expected |= _quantised_tensors(name, shape, group, floating)
    return expected


def _mtp_shapes(text: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    count, hidden = text.get("mtp_num_hidden_layers", 0), text["hidden_size"]
    if not count:
        return {}
    # An MTP layer has the shapes of the backbone's full-attention layers.
    prefix = f"layers.{text['layer_types'].index('full_attention')}."
    layer = {name.split(prefix)[1]: shape for name, shape in shapes.items() if prefix in name}
    norms = ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
    return {
        "mtp.fc.weight": (hidden, 2 * hidden),
        **{f"mtp.{norm}.weight": (hidden,) for norm in norms},
        **{f"mtp.layers.{i}.{name}": shape for i in range(count) for name, shape in layer.items()},
    }


def _quantised_tensors(
    module: str, shape: tuple[int, ...], group: Mapping[str, Any], floating: tuple[str, ...]
) -> ExpectedTensors:
    rows, columns = shape
    weights = group["weights"]
    scales = 1 if weights.get("strategy") == "channel" else columns // (weights.get("group_size") or columns)
    expected: ExpectedTensors = {f"{module}.weight_scale": ((rows, scales), floating)}
    if group.get("format") == "int-quantized":
        return {f"{module}.weight": (shape, ("I8",)), **expected}
    per_word = 32 // weights["num_bits"]
    expected[f"{module}.weight_packed"] = ((rows, columns // per_word), ("I32",))
    expected[f"{module}.weight_shape"] = ((2,), ("I64",))
    if not weights["symmetric"]:
        expected[f"{module}.weight_zero_point"] = ((math.ceil(rows / per_word), scales), ("I32",))
    return expected
