"""config.json of a checkpoint, read and written."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slimqwen.checkpoint.errors import CorruptCheckpointError
from slimqwen.checkpoint.stored_file import refuse_pointer

RANDOM_WEIGHTS = "random_weights"
"""Key of config.json of a checkpoint without weights: vLLM makes random ones, which show only speed and memory."""


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json.

    Raises:
        CorruptCheckpointError: the file is missing, is not a JSON object, or names no architecture.
    """
    config = read_json_object(folder / "config.json")
    if not isinstance(config.get("architectures"), list) or not config["architectures"]:
        raise CorruptCheckpointError(f'{folder / "config.json"} has no "architectures"')
    return config


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write config.json with its keys in the order of `config`."""
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of the language model: `text_config` of a multimodal model, else the whole config.

    `dtype` (`torch_dtype` in older files) and `tie_word_embeddings` may be outside or inside `text_config`; the value
    outside takes precedence. A key that is in neither place is missing from the result, except head_dim and
    num_key_value_heads, which are derived from the number of heads.

    Raises:
        CorruptCheckpointError: `text_config` is not a JSON object, or a dimension is not a number.
    """
    inner: Mapping[str, Any] = config.get("text_config", config)
    if not isinstance(inner, Mapping):
        raise CorruptCheckpointError(f"config.json: text_config is {inner!r}, not an object")
    for key in ("hidden_size", "num_attention_heads", "max_position_embeddings"):
        if not isinstance(value := inner.get(key), int | None):
            raise CorruptCheckpointError(f"config.json: {key} is {value!r}, not a whole number")
    shared: dict[str, Any] = {}
    if (heads := inner.get("num_attention_heads")) and (hidden := inner.get("hidden_size")):
        derived = {"head_dim": hidden // heads, "num_key_value_heads": heads}
        shared = {key: value for key, value in derived.items() if inner.get(key) is None}
    for part in (inner, config):
        for key in ("torch_dtype", "dtype", "tie_word_embeddings"):
            if part.get(key) is not None:
                shared[key.removeprefix("torch_")] = part[key]
    return {**inner, **shared}


def quantisation(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """quantization_config, from any of the places where a config.json may have it; empty for unquantised weights."""
    inner: Mapping[str, Any] = config.get("text_config", {})
    found: Mapping[str, Any] | None = (
        config.get("quantization_config")
        or config.get("compression_config")  # compressed-tensors' older name
        or inner.get("quantization_config")
    )
    return found or {}


def quantised(config: Mapping[str, Any], form: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the config with `form` as its only quantization_config, at the top level."""
    changed = {key: value for key, value in config.items() if key != "compression_config"}
    changed["quantization_config"] = dict(form)
    if "text_config" in config:
        inner = {key: value for key, value in config["text_config"].items() if key != "quantization_config"}
        changed["text_config"] = inner
    return changed


def untied(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the config that says that the output head is not tied to the embedding, in `text_config` too."""
    changed = {**config, "tie_word_embeddings": False}
    if "text_config" in config:
        changed["text_config"] = {**config["text_config"], "tie_word_embeddings": False}
    return changed


def has_random_weights(folder: Path) -> bool:
    """Whether a checkpoint has no weights of its own, so that vLLM makes random ones and responses mean nothing.

    Raises:
        CorruptCheckpointError: config.json cannot be read.
    """
    return RANDOM_WEIGHTS in read_config(folder)


def read_json_object(file: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
        CorruptCheckpointError: the file is missing or holds something else.
    """
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise CorruptCheckpointError(f"{file} is missing") from None
    except ValueError as error:
        refuse_pointer(file)
        raise CorruptCheckpointError(f"{file} is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise CorruptCheckpointError(f"{file} is not a JSON object")
    return content
