"""A small checkpoint for each test."""

import json
from pathlib import Path

import pytest

from slimqwen.checkpoint.config import write_config
from slimqwen.checkpoint.tensors import write_tensors
from tests.checkpoints import new_tensor


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of two shards with an index."""
    folder = tmp_path / "small"
    folder.mkdir()
    write_config(folder, {"architectures": ["Qwen3_5ForCausalLM"]})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    write_tensors(folder / "model-00001.safetensors", {"a": new_tensor("BF16", (2, 3), b"a" * 12)})
    write_tensors(
        folder / "model-00002.safetensors",
        {"b": new_tensor("I64", (1,), b"b" * 8), "c": new_tensor("BF16", (5,), b"c" * 10)},
    )
    places = {"a": "model-00001.safetensors", "b": "model-00002.safetensors", "c": "model-00002.safetensors"}
    index = {"metadata": {"total_size": 30}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
