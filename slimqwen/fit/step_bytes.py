"""What packing the draft head and the embedding saves a variant: bytes of a decode step, and of the weights."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from slimqwen import variant as variants
from slimqwen.fit import cost
from slimqwen.fit.architecture import Model, shape_model
from slimqwen.fit.memory import DRAFT_DEPTH, SPEED_CONTEXT_LEN, ServerSettings
from slimqwen.fit.subject import find_subject
from slimqwen.models.shape import Shape
from slimqwen.plan import shapes
from slimqwen.plan.devices import Gpu, read_gpus
from slimqwen.records.table import Table

_GB = 1e9
_ROWS = (("qwen3.8-27b-best", "rtx-3090"), ("qwen3.5-9b-best", "rtx-3090"), ("qwen3.5-4b-best", "a10g"))
"""Variants, and the GPU that each is judged on."""

_TABLES = ("draft_head", "embed_tokens")


@dataclass(frozen=True)
class SavedBytes:
    """A variant with draft head and embedding in 16 bits, and as its recipe packs them.

    Attributes:
        variant: name of the variant.
        before: the model with both in 16 bits.
        after: the model as the recipe packs them.
        gpu: the GPU that the variant is judged on.
    """

    variant: str
    before: Model
    after: Model
    gpu: Gpu

    @classmethod
    def of(cls, variant: str, gpu: Gpu, root: Path) -> "SavedBytes":
        """Compute both from the tensor dimensions that the variant's recipe gives.

        Raises:
            ShapeError: the dimensions are not known.
            FitError: the variant's flags or dtypes cannot be used.
        """
        subject = find_subject(variant, root)
        settings = ServerSettings.of(subject, None, None)
        shape = shapes.variant_shape(variants.load(variant, root))
        others = {kind: packed for kind, packed in shape.quantised.items() if kind not in _TABLES}
        whole = replace(shape, quantised=others)

        def model(shape: Shape) -> Model:
            return shape_model(
                shape, kv_cache_dtype=settings.kv_cache_dtype, state_dtype=settings.state_dtype
            )

        return cls(variant, model(whole), model(shape), gpu)

    def step_bytes(self, model: Model) -> int:
        """Bytes that a decode step of one sequence of 2,048 cached tokens with 4 drafts reads and writes."""
        return sum(cost.count_part_bytes(model, DRAFT_DEPTH, SPEED_CONTEXT_LEN).values())

    def step_seconds(self, model: Model) -> float:
        """Shortest time of a decode step of one sequence of 2,048 cached tokens with 4 drafts, seconds."""
        return cost.bound_decode_step(model, self.gpu, 1, SPEED_CONTEXT_LEN, DRAFT_DEPTH).seconds


def step_bytes_table(root: Path) -> Table:
    """What packing embedding and draft head saves three variants of Qwen: a row each, with step and weights."""
    known = read_gpus(root)
    rows = [SavedBytes.of(variant, known[gpu], root) for variant, gpu in _ROWS]

    def both(size: Callable[[Model], int]) -> Callable[[SavedBytes], object]:
        return lambda row: f"{size(row.before) / _GB:.3f} -> {size(row.after) / _GB:.3f}"

    columns: dict[str, Callable[[SavedBytes], object]] = {
        "variant": lambda row: row.variant,
        "GPU": lambda row: row.gpu.name,
        "draft head, GB": both(lambda model: model.draft_output.bytes),
        f"step, K = {DRAFT_DEPTH}, GB": lambda row: (
            f"{row.step_bytes(row.before) / _GB:.2f} -> {row.step_bytes(row.after) / _GB:.2f}"
        ),
        "step, ms": lambda row: (
            f"{1e3 * row.step_seconds(row.before):.1f} -> {1e3 * row.step_seconds(row.after):.1f}"
        ),
        "faster": lambda row: f"{row.step_seconds(row.before) / row.step_seconds(row.after):.3f}x",
        "embedding, GB": both(lambda model: 0 if model.tied else model.embedding_bytes),
        "weights, GB": both(lambda model: model.resident_bytes(DRAFT_DEPTH)),
    }
    return Table.from_rows(
        "A decode step and the weights with draft head and embedding in 16 bits, and as the recipe packs them",
        rows,
        columns,
        f"One sequence of {SPEED_CONTEXT_LEN:,} cached tokens. Step = layers + output head + {DRAFT_DEPTH} x (MTP head "
        "+ draft head) + states and KV cache; a row of the embedding is negligible. An embedding of 0 is tied to the "
        "output head, which is part of a step. Computed, not timed.",
        text_columns=2,
    )
