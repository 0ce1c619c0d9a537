"""The record kind roofline: the shortest decode step of a variant on a GPU, one optimisation after another."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from slimqwen.plan.devices import GpuSheet
from slimqwen.records.provenance import source_note
from slimqwen.records.record import Block, Record
from slimqwen.records.table import Table

PARTS = ("layers", "output head", "draft layers", "draft head", "states and KV cache")
"""The parts that a decode step reads and writes, in the order of tables."""


class StepBound(Block):
    """The fastest decode step of one batch."""

    num_speculative_tokens: NonNegativeInt
    acceptance_length: float = Field(ge=1, description="output tokens per step and sequence")
    context_len: PositiveInt = Field(description="cached tokens per sequence")
    batch_size: PositiveInt
    bytes: NonNegativeFloat = Field(description="memory traffic of all passes of the step")
    flops: NonNegativeFloat = Field(description="FLOPs of all passes of the step, all precisions")
    seconds: PositiveFloat = Field(description="shortest duration of the step")
    limited_by: Literal["memory", "compute"] = Field(description="what limits the verify pass")
    tokens_per_second: PositiveFloat = Field(description="highest output rate of the batch")


class WaterfallStep(Block):
    """A decode step of one sequence with one more optimisation than the step before."""

    optimisation: str = Field(min_length=1)
    num_speculative_tokens: NonNegativeInt
    part_bytes: dict[str, NonNegativeInt] = Field(description="memory traffic of the step by part")
    seconds: PositiveFloat = Field(description="shortest duration of the step")

    @property
    def bytes(self) -> int:
        """Memory traffic of the whole step."""
        return sum(self.part_bytes.values())


class Roofline(Record):
    """The fastest that a variant could run on a GPU by its data sheet; computed, not timed."""

    kind = "roofline"
    version = 3
    verb = "roofline"
    verb_options = "--gpu NAME --record"

    gpu: GpuSheet
    dimensions: str = Field(min_length=1, description="where the checkpoint's dimensions come from")
    acceptance: str = Field(min_length=1, description="source of the acceptance length, or why none is known")
    l2_share: float = Field(ge=0, le=1, description="share of the weights that fits into the L2 cache")
    context_len: PositiveInt = Field(description="cached tokens of the waterfall")
    waterfall: tuple[WaterfallStep, ...] = Field(min_length=1)
    decode: tuple[StepBound, ...] = Field(min_length=1)
    prefill_seconds: dict[str, PositiveFloat] = Field(
        description="shortest time of a prompt of one sequence, by its number of tokens"
    )

    @property
    def topic(self) -> str:
        """GPU and context length of the record."""
        return f"{self.gpu.name}, {self.context_len}"

    def tables(self, path: Path) -> list[Table]:
        """The waterfall with a row per optimisation, and the bounds by context length."""
        return [self._waterfall_table(path), self._bounds_table()]

    def _waterfall_table(self, path: Path) -> Table:
        first = self.waterfall[0]
        # The embedded model is a thousand times smaller than those that GPUs are bought for.
        unit, size, digits = (
            ("GB", 1e9, 1) if max(step.bytes for step in self.waterfall) >= 1e8 else ("MB", 1e6, 3)
        )
        columns: dict[str, Callable[[WaterfallStep], object]] = {
            "optimisation": lambda step: step.optimisation,
            "K": lambda step: step.num_speculative_tokens,
        }
        for part in PARTS:
            columns[f"{part}, {unit}"] = lambda step, part=part: f"{step.part_bytes[part] / size:.2f}"  # type: ignore[misc]
        columns |= {
            f"step, {unit}": lambda step: f"{step.bytes / size:.2f}",
            "step, ms": lambda step: f"{1e3 * step.seconds:.{digits}f}",
            "step ratio": lambda step: f"{step.seconds / first.seconds:.2f}x",
        }
        return Table.from_rows(
            f"A decode step of {self.variant} on {self.gpu.name}, optimisation by optimisation (roofline)",
            self.waterfall,
            columns,
            f"One sequence of {self.context_len:,} cached tokens at {self.gpu.memory_bandwidth_gb_per_s:g} GB/s "
            f"({self.gpu.source}); each row adds an optimisation to the one above. Computed, not timed.",
            "Drafts pay where the acceptance length exceeds the step ratio to the same model without drafts.",
            f"Dimensions: {self.dimensions}.",
            source_note(self, path),
        )

    def _bounds_table(self) -> Table:
        # One row for a context and K: of one sequence, and of as many as are served at once.
        rows = [
            [row for row in self.decode if (row.context_len, row.num_speculative_tokens) == key]
            for key in dict.fromkeys((row.context_len, row.num_speculative_tokens) for row in self.decode)
        ]
        columns: dict[str, Callable[[list[StepBound]], object]] = {
            "context": lambda row: f"{row[0].context_len:,}",
            "prefill, ms": lambda row: f"{1e3 * self.prefill_seconds[str(row[0].context_len)]:,.1f}",
            "K": lambda row: row[0].num_speculative_tokens,
            "tokens/s at most": lambda row: f"{row[0].tokens_per_second:,.1f}",
            "sequences": lambda row: row[-1].batch_size,
            "tokens/s of all at most": lambda row: f"{row[-1].tokens_per_second:,.1f}",
            "limited by": lambda row: row[-1].limited_by,
        }
        return Table.from_rows(
            f"Bounds of {self.variant} on {self.gpu.name} by context length",
            rows,
            columns,
            f"Acceptance length: {self.acceptance}.",
            *(
                [f"The L2 cache holds {self.l2_share:.0%} of the weights, which need not be read again."]
                if self.l2_share > 0.1
                else []
            ),
            *filter(None, [self.gpu.note]),
        )
