"""The predicted time of a decode step: from the checkpoint's tensors and the measured rates of the CPU.

The bound of `slimqwen.analysis.roofline` is bytes over bandwidth, or FLOPs over peak. `parts_ms` adds the terms that it
leaves out, each measured on its own and none fitted to the variants:

- weights are read at the rate of the product that reads them (16, 8 or 4 bits, so many tokens a pass);
- every draft pass reads the MTP head and its output head;
- recurrent states are read once and written once for every token of a verify step, and the KV cache is read;
- the host: the step time of a model with the same layers whose matrices are too narrow to take time.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slimqwen.analysis.roofline import cost
from slimqwen.analysis.roofline.architecture import Model, Weights
from slimqwen.analysis.roofline.gpu import RooflineError
from slimqwen.checkpoint.shape import Shape
from slimqwen.plan import random_weights

PARTS = (*cost.PARTS, "host")
"""Terms of a step, in the order of charts."""

_KINDS = {"I8": "int8", "I32": "int4"}
"""Stored dtype -> product that reads it; everything else is read in 16 bits."""

_NARROW = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "vocab_size": 8192,
}


def narrow_checkpoint(config: Mapping[str, Any], folder: Path, tokenizer: Path) -> Path:
    """A checkpoint with the layers of another, so narrow that a step is the host's work alone.

    Args:
        config: the language model's part of the other's config.json.
        folder: folder of the checkpoint, which is written if missing.
        tokenizer: checkpoint whose tokenizer files are copied.
    """
    if not folder.exists():
        text = {**config, **_NARROW, "tie_word_embeddings": True}
        for key in [key for key in text if key.startswith("mtp_draft") or key == "quantization_config"]:
            del text[key]
        shape = Shape({"text_config": text}, {}, "the layers of another checkpoint, narrow")
        random_weights.write(shape, folder, tokenizer, seed=0)
    return folder


def parts_ms(
    model: Model,
    rates: Mapping[str, float],
    bandwidth: float,
    host_ms: float,
    num_speculative_tokens: int,
    context_len: int,
) -> dict[str, float]:
    """Milliseconds of one sequence's step by `PARTS`.

    Args:
        rates: bytes of weights a second by product and tokens, from `device.measure`.
        bandwidth: bytes a second of states and KV cache.
        host_ms: step time of the narrow model at this K.
        context_len: cached tokens.
    """
    tokens, drafts = num_speculative_tokens + 1, num_speculative_tokens
    other_bytes = cost.part_bytes(model, drafts, context_len)["states and KV cache"]
    # A verify step keeps the state after every one of its tokens, since any of them may be the last accepted.
    other_bytes += (tokens - 1) * model.state_bytes
    seconds = (
        _seconds(model.body, rates, tokens),
        _seconds(model.head, rates, tokens),
        drafts * _seconds(model.drafter, rates, 1),
        drafts * _seconds(model.draft_output, rates, 1),
        other_bytes / bandwidth,
        host_ms / 1e3,
    )
    return {part: 1e3 * value for part, value in zip(PARTS, seconds, strict=True)}


def _seconds(weights: Weights, rates: Mapping[str, float], tokens: int) -> float:
    seconds = 0.0
    for dtype, count in weights.bytes_by_dtype.items():
        product = f"{_KINDS.get(dtype, 'bf16')}_{tokens}"
        if product not in rates:
            raise RooflineError(
                f"this CPU has no product of {dtype} weights; time variants without it, or on a CPU with AVX-512"
            )
        seconds += count / rates[product]
    return seconds
