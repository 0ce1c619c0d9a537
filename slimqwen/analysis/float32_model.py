"""A checkpoint in transformers, float32 on the CPU: scores texts without a server."""

import json
from pathlib import Path
from typing import Any

from slimqwen import checkpoint


def load_model(folder: Path) -> tuple[Any, int]:
    """The model of a checkpoint, and the id of the end-of-text token, which precedes every scored text."""
    import torch
    import transformers

    config = checkpoint.read_config(folder)
    architecture = getattr(transformers, config["architectures"][0])
    file = folder / "generation_config.json"
    generation = json.loads(file.read_bytes()) if file.is_file() else {}
    end_of_text = generation.get("pad_token_id", checkpoint.text_config(config)["eos_token_id"])
    return architecture.from_pretrained(folder, dtype=torch.float32).eval(), end_of_text
