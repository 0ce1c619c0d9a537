"""config.json of a checkpoint, read and written."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slimqwen.checkpoint.errors import CorruptCheckpointError

RANDOM_WEIGHTS = "random_weights"
"""Key of config.json: vLLM draws the weights at random. They answer for speed and memory only."""


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json.

    Raises:
        CorruptCheckpointError: it is missing, is not a JSON object, or names no architecture.
    """
    config = read_json_object(folder / "config.json")
    if not isinstance(config.get("architectures"), list) or not config["architectures"]:
        raise CorruptCheckpointError(f'{folder / "config.json"} has no "architectures"')
    return config


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write config.json, its keys in the order given."""
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's settings: `text_config` of a multimodal model, else the whole.

    `dtype` (`torch_dtype` in older files) and `tie_word_embeddings` may stand outside, inside or both; what stands
    outside counts. A key that stands nowhere is missing.
    """
    inner: Mapping[str, Any] = config.get("text_config", config)
    shared: dict[str, Any] = {}
    for part in (inner, config):
        for key in ("torch_dtype", "dtype", "tie_word_embeddings"):
            if part.get(key) is not None:
                shared[key.removeprefix("torch_")] = part[key]
    return {**inner, **shared}


def quantisation(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """quantization_config, wherever a config.json has it; empty where the weights are not quantised."""
    inner: Mapping[str, Any] = config.get("text_config", {})
    found: Mapping[str, Any] | None = (
        config.get("quantization_config")
        or config.get("compression_config")  # compressed-tensors' older name
        or inner.get("quantization_config")
    )
    return found or {}


def quantised(config: Mapping[str, Any], form: Mapping[str, Any]) -> dict[str, Any]:
    """A config with this quantization_config at the place that counts, and at no other."""
    changed = {key: value for key, value in config.items() if key != "compression_config"}
    changed["quantization_config"] = dict(form)
    if "text_config" in config:
        inner = {key: value for key, value in config["text_config"].items() if key != "quantization_config"}
        changed["text_config"] = inner
    return changed


def untied(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config, its text part too, whose output head is not tied to the embedding."""
    changed = {**config, "tie_word_embeddings": False}
    if "text_config" in config:
        changed["text_config"] = {**config["text_config"], "tie_word_embeddings": False}
    return changed


def has_random_weights(folder: Path) -> bool:
    """Whether a checkpoint has no weights of its own, so that its responses mean nothing."""
    return RANDOM_WEIGHTS in read_config(folder)


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
