"""Roofline of decoding: the shortest time in which a GPU can do a step, from tensor shapes and a data sheet.

A forward pass takes at least max(bytes / memory bandwidth, FLOPs / peak FLOP/s): the roofline model of Williams,
Waterman and Patterson (CACM 52, 2009). A decode step is one verify pass over K + 1 tokens per sequence (the last token
and K drafts) and K sequential passes of the MTP head. The model counts

- every weight once per pass, at its stored size. Rows of an embedding are gathered, but one that is tied to the output
  head is read whole. Packed weights are multiplied in 16 bits: packing saves bytes, not FLOPs;
- the KV cache of full-attention layers;
- the states of Gated DeltaNet layers (Yang, Kautz and Hatamizadeh, arXiv:2412.06464), read and written once per step;
- one multiply-add as two FLOPs.

Activations, norms, sampling, kernel launches and the host are not counted, so a real server is slower.

`context_len` is the number of cached tokens of each sequence, `num_speculative_tokens` that of a step's drafts (K).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from slimqwen.fit import FitError
from slimqwen.fit.architecture import Model, Weights
from slimqwen.formats.format import Precision
from slimqwen.plan.devices import Gpu

PARTS = ("layers", "output head", "draft layers", "draft head", "states and KV cache")
"""The parts that a decode step reads and writes, in the order of tables."""


class StepBound(NamedTuple):
    """A decode step of one batch at the roofline: its traffic, arithmetic, shortest time, and most output tokens/s."""

    bytes: float  # memory traffic of all passes
    flops: float  # of all passes and precisions
    seconds: float
    tokens_per_second: float  # highest output rate of the batch


_NOTHING = Weights(0, {})


@dataclass(frozen=True)
class PassWork:
    """Memory traffic (bytes) and arithmetic (FLOPs by precision) of one forward pass."""

    bytes: float  # read from and written to GPU memory
    flops: Mapping[Precision, float]

    def __add__(self, other: "PassWork") -> "PassWork":
        precisions = self.flops.keys() | other.flops.keys()
        flops = {each: self.flops.get(each, 0) + other.flops.get(each, 0) for each in precisions}
        return PassWork(self.bytes + other.bytes, flops)

    @property
    def total_flops(self) -> float:
        """FLOPs of all precisions."""
        return sum(self.flops.values())

    def memory_seconds(self, gpu: Gpu) -> float:
        """Shortest time of the memory traffic on a GPU, seconds."""
        return self.bytes / gpu.bandwidth

    def compute_seconds(self, gpu: Gpu) -> float:
        """Shortest time of the FLOPs, seconds; precisions share the matrix units, so their times add up."""
        return sum(count / gpu.peak(precision) for precision, count in self.flops.items())

    def seconds(self, gpu: Gpu) -> float:
        """Shortest time of the pass, seconds."""
        return max(self.memory_seconds(gpu), self.compute_seconds(gpu))


def count_verify_work(
    model: Model, batch_size: int, context_len: int, num_speculative_tokens: int = 0
) -> PassWork:
    """Work of one verify pass over the last token and all drafted tokens of each sequence."""
    tokens = batch_size * (num_speculative_tokens + 1)
    row_and_state_bytes = tokens * model.embedding_row_bytes + 2 * batch_size * model.state_bytes
    return (
        _weights(model.body, tokens)
        + _weights(model.head, tokens)
        + PassWork(row_and_state_bytes, {"bf16": tokens * model.state_flops})
        + _attention(model, model.attention_layers, batch_size, tokens, context_len)
    )


def count_draft_work(model: Model, batch_size: int, context_len: int) -> PassWork:
    """Work of one of the K draft passes of the MTP head, over one token per sequence."""
    return (
        _weights(model.drafter, batch_size)
        + _weights(model.draft_output, batch_size)
        + PassWork(batch_size * model.embedding_row_bytes, {})
        + _attention(model, model.drafter_layers, batch_size, batch_size, context_len)
    )


def bound_decode_step(
    model: Model,
    gpu: Gpu,
    batch_size: int,
    context_len: int,
    num_speculative_tokens: int = 0,
    acceptance_length: float = 1.0,
) -> StepBound:
    """Compute the fastest possible decode step of a batch, with the drafts that it takes.

    Args:
        model: bytes and FLOPs of the model.
        gpu: data sheet of the GPU.
        batch_size: sequences that a step decodes together.
        context_len: cached tokens of each sequence.
        num_speculative_tokens: drafted tokens of a step (K); 0 without drafts.
        acceptance_length: output tokens that a step yields for a sequence, 1 to K + 1; 1 without drafts.

    Raises:
        FitError: `acceptance_length` is not between 1 and K + 1.
    """
    if not 1 <= acceptance_length <= num_speculative_tokens + 1:
        raise FitError(
            f"acceptance length {acceptance_length} is impossible with {num_speculative_tokens} drafted tokens; "
            f"give one between 1 and {num_speculative_tokens + 1}"
        )
    verify_work = count_verify_work(model, batch_size, context_len, num_speculative_tokens)
    draft_work = count_draft_work(model, batch_size, context_len)
    seconds = verify_work.seconds(gpu) + num_speculative_tokens * draft_work.seconds(gpu)
    return StepBound(
        bytes=verify_work.bytes + num_speculative_tokens * draft_work.bytes,
        flops=verify_work.total_flops + num_speculative_tokens * draft_work.total_flops,
        seconds=seconds,
        tokens_per_second=batch_size * acceptance_length / seconds,
    )


def count_part_bytes(model: Model, num_speculative_tokens: int, context_len: int) -> dict[str, int]:
    """Bytes that a decode step of one sequence reads and writes, by part of `PARTS`."""
    depth = num_speculative_tokens
    without_weights = replace(model, body=_NOTHING, head=_NOTHING, drafter=_NOTHING, draft_head=_NOTHING)
    other_bytes = count_verify_work(without_weights, 1, context_len, depth).bytes
    other_bytes += depth * count_draft_work(without_weights, 1, context_len).bytes
    body = round(model.body.read_bytes(depth + 1))
    drafts = depth * round(model.drafter.read_bytes(1)), depth * model.draft_output.bytes
    return dict(zip(PARTS, (body, model.head.bytes, *drafts, round(other_bytes)), strict=True))


def _attention(model: Model, layers: int, batch_size: int, tokens: int, context_len: int) -> PassWork:
    """KV cache traffic and attention FLOPs of `tokens` query tokens."""
    return PassWork(
        layers * model.kv_bytes * (batch_size * context_len + tokens),
        {model.attention_precision: layers * tokens * context_len * model.attention_flops},
    )


def _weights(weights: Weights, tokens: int) -> PassWork:
    """Work of reading weights and multiplying `tokens` tokens by them."""
    flops = {precision: tokens * flops for precision, flops in weights.flops.items()}
    return PassWork(weights.read_bytes(tokens), flops)
