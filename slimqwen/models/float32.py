"""A checkpoint in transformers, float32: what engines and rounded weights are compared with."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CompressedTensorsConfig

from slimqwen import checkpoint


def load_in_float32(weights: Path) -> Any:
    """A checkpoint in transformers, its packed weights dequantised, on the GPU if there is one."""
    config = checkpoint.read_config(weights)
    quantised = "quantization_config" in config
    dequantise = {"quantization_config": CompressedTensorsConfig(run_compressed=False)} if quantised else {}
    transformers.utils.logging.set_verbosity_error()
    # A multimodal checkpoint's own class, because the text model's does not see that it is quantised.
    architecture = getattr(transformers, config["architectures"][0])
    model = architecture.from_pretrained(weights, dtype=torch.float32, **dequantise).eval()
    return model.to("cuda" if torch.cuda.is_available() else "cpu")
