"""Cost model: bytes and FLOPs of a forward pass, and the shortest time in which a GPU can do it.

`context_len` are the cached tokens of each sequence, `num_speculative_tokens` the drafted tokens of a step (K).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from slimqwen.analysis.roofline.architecture import Model, Weights
from slimqwen.analysis.roofline.gpu import Device, Precision, RooflineError
from slimqwen.analysis.roofline.record import Bound

PARTS = ("layers", "output head", "draft layers", "draft head", "states and KV cache")
"""What a decode step reads and writes, in the order of tables and charts."""

_NOTHING = Weights({}, {})


@dataclass(frozen=True)
class Work:
    """Memory traffic and arithmetic of one pass.

    Attributes:
        bytes: bytes read from and written to GPU memory.
        flops: FLOPs by precision.
    """

    bytes: float
    flops: Mapping[Precision, float]

    def __add__(self, other: "Work") -> "Work":
        flops = dict(self.flops)
        for precision, count in other.flops.items():
            flops[precision] = flops.get(precision, 0) + count
        return Work(self.bytes + other.bytes, flops)

    @property
    def total_flops(self) -> float:
        """FLOPs of all precisions."""
        return sum(self.flops.values())

    def memory_seconds(self, gpu: Device) -> float:
        """Shortest time for the bytes."""
        return self.bytes / gpu.bandwidth

    def compute_seconds(self, gpu: Device) -> float:
        """Shortest time for the FLOPs; precisions share the matrix units, so their times add up."""
        return sum(count / gpu.peak(precision) for precision, count in self.flops.items())

    def seconds(self, gpu: Device) -> float:
        """Shortest time of the pass."""
        return max(self.memory_seconds(gpu), self.compute_seconds(gpu))

    def limit(self, gpu: Device) -> Literal["memory", "compute"]:
        """The one that takes longer."""
        return "memory" if self.memory_seconds(gpu) >= self.compute_seconds(gpu) else "compute"


def verify(model: Model, batch_size: int, context_len: int, num_speculative_tokens: int = 0) -> Work:
    """One verify pass: the last token and all drafts of each sequence."""
    tokens = batch_size * (num_speculative_tokens + 1)
    row_and_state_bytes = tokens * model.embedding_row_bytes + 2 * batch_size * model.state_bytes
    return (
        _weights(model.body, tokens)
        + _weights(model.head, tokens)
        + Work(row_and_state_bytes, {"bf16": tokens * model.state_flops})
        + _attention(model, model.attention_layers, batch_size, tokens, context_len)
    )


def draft(model: Model, batch_size: int, context_len: int) -> Work:
    """One of the K draft passes of the MTP head: one token per sequence."""
    return (
        _weights(model.drafter, batch_size)
        + _weights(model.draft_output, batch_size)
        + Work(batch_size * model.embedding_row_bytes, {})
        + _attention(model, model.drafter_layers, batch_size, batch_size, context_len)
    )


def prefill(model: Model, num_tokens: int, num_speculative_tokens: int = 0) -> Work:
    """One pass over a prompt up to its first output token; with speculation the MTP head's cache is filled too."""
    layers = model.cached_layers(num_speculative_tokens)
    causal_pairs = num_tokens * (num_tokens + 1) // 2
    row_and_cache_bytes = num_tokens * (model.embedding_row_bytes + layers * model.kv_bytes)
    return (
        _weights(model.body, num_tokens)
        + _weights(model.head, 1)
        + _weights(model.drafter if num_speculative_tokens else _NOTHING, num_tokens)
        + Work(row_and_cache_bytes + model.state_bytes, {"bf16": num_tokens * model.state_flops})
        + Work(0, {model.attention_precision: layers * causal_pairs * model.attention_flops})
    )


def decode(
    model: Model,
    gpu: Device,
    batch_size: int,
    context_len: int,
    num_speculative_tokens: int = 0,
    acceptance_length: float = 1.0,
) -> Bound:
    """The fastest decode step.

    Args:
        acceptance_length: output tokens per step and sequence, from 1 to K + 1.

    Raises:
        RooflineError: the acceptance length is impossible for K.
    """
    if not 1 <= acceptance_length <= num_speculative_tokens + 1:
        raise RooflineError(
            f"acceptance length {acceptance_length} is impossible with {num_speculative_tokens} drafted tokens; "
            f"it lies between 1 and {num_speculative_tokens + 1}"
        )
    verify_work = verify(model, batch_size, context_len, num_speculative_tokens)
    draft_work = draft(model, batch_size, context_len)
    seconds = verify_work.seconds(gpu) + num_speculative_tokens * draft_work.seconds(gpu)
    return Bound(
        batch_size=batch_size,
        bytes=verify_work.bytes + num_speculative_tokens * draft_work.bytes,
        flops=verify_work.total_flops + num_speculative_tokens * draft_work.total_flops,
        seconds=seconds,
        limited_by=verify_work.limit(gpu),
        tokens_per_second=batch_size * acceptance_length / seconds,
    )


def part_bytes(model: Model, num_speculative_tokens: int, context_len: int) -> dict[str, int]:
    """Bytes that a decode step of one sequence reads and writes, by `PARTS`."""
    depth = num_speculative_tokens
    without_weights = replace(model, body=_NOTHING, head=_NOTHING, drafter=_NOTHING, draft_head=_NOTHING)
    other_bytes = verify(without_weights, 1, context_len, depth).bytes
    other_bytes += depth * draft(without_weights, 1, context_len).bytes
    weights = (
        model.body.bytes,
        model.head.bytes,
        depth * model.drafter.bytes,
        depth * model.draft_output.bytes,
    )
    return dict(zip(PARTS, (*weights, round(other_bytes)), strict=True))


def _attention(model: Model, layers: int, batch_size: int, tokens: int, context_len: int) -> Work:
    """KV cache traffic and attention FLOPs of `tokens` query tokens."""
    return Work(
        layers * model.kv_bytes * (batch_size * context_len + tokens),
        {model.attention_precision: layers * tokens * context_len * model.attention_flops},
    )


def _weights(weights: Weights, tokens: int) -> Work:
    """Weights that are read once, and their products with `tokens` tokens."""
    return Work(weights.bytes, {precision: tokens * flops for precision, flops in weights.flops.items()})
