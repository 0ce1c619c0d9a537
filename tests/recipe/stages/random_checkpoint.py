"""A narrow checkpoint with random weights."""

from pathlib import Path

from slimqwen.checkpoint.shape import Shape
from slimqwen.plan import random_weights, shapes
from tests.checkpoints import TINY

ROWS = 8448
_NARROW = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": ROWS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_hidden_layers": 2,
}


def write(folder: Path) -> Path:
    """Write one with 8,448 rows of vocabulary and an MTP head."""
    published = shapes.published_shape(TINY.parents[1], "qwen3.5-0.8b")
    assert published is not None
    shape = Shape({**published.config, "text_config": {**published.text, **_NARROW}}, {}, "narrow")
    random_weights.write(shape, folder, TINY, seed=0)
    return folder
