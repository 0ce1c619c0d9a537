"""What an outline says of a checkpoint before it exists is what the checkpoint has."""

import json
import math
import shutil
from pathlib import Path

import pytest

from slimqwen.checkpoint.tensors import INDEX
from slimqwen.models.outline import Outline
from tests.checkpoints import TINY

WHOLE = Outline.read(TINY)
SIZES = {name: math.prod(info.shape) for name, info in WHOLE.tensors.items()}


@pytest.mark.parametrize("total_size", [0, 10**8])
def test_config_and_index_alone_give_the_tensors_and_the_size(tmp_path: Path, total_size: int) -> None:
    for name in ("config.json", "tokenizer.json"):
        shutil.copyfile(TINY / name, tmp_path / name)
    index = {
        "metadata": {"total_size": total_size},
        "weight_map": dict.fromkeys(SIZES, "model.safetensors"),
    }
    (tmp_path / INDEX).write_text(json.dumps(index))
    outline = Outline.read(tmp_path)
    assert {name: math.prod(info.shape) for name, info in outline.tensors.items()} == SIZES
    stored = sum(info.end - info.start for info in outline.tensors.values())
    assert outline.disk_bytes == max(stored, total_size)
    assert outline.num_tokens == WHOLE.num_tokens == 8192


def test_weights_are_counted_in_all_in_the_largest_layer_in_tables_and_in_linears() -> None:
    layers = [sum(SIZES[name] for name in SIZES if name.startswith(f"model.layers.{n}.")) for n in range(4)]
    assert WHOLE.num_weights == sum(SIZES.values())
    assert WHOLE.num_layer_weights == max(layers) > min(layers)
    assert WHOLE.num_table_weights == SIZES["model.embed_tokens.weight"]
    mlp = [name for name in SIZES if ".mlp." in name and not name.startswith("mtp.")]
    assert WHOLE.num_weights_of("mlp") == sum(SIZES[name] for name in mlp)
    assert WHOLE.num_weights_of("mlp", "attention") > WHOLE.num_weights_of("mlp")


def test_fewer_tokens_shorten_the_tables_alone() -> None:
    small = WHOLE.with_vocabulary(1000)
    assert (small.num_tokens, small.text["vocab_size"], small.num_table_weights) == (1000, 1000, 1000 * 192)
    assert small.num_weights - small.num_table_weights == WHOLE.num_weights - WHOLE.num_table_weights
    assert small.disk_bytes == WHOLE.disk_bytes - 7192 * 192 * 2
