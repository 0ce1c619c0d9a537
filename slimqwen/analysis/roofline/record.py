"""The record kind roofline: bounds of variants on a GPU, with their tables and chart panels."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from slimqwen.analysis.roofline.gpu import Gpu
from slimqwen.records.record import Block, Record
from slimqwen.records.table import Table

BytesByDtype = dict[str, NonNegativeInt]
Limit = Literal["memory", "compute"]


class Bound(Block):
    """The fastest decode step of one batch."""

    batch_size: PositiveInt
    bytes: NonNegativeFloat = Field(description="memory traffic of all passes of the step")
    flops: NonNegativeFloat = Field(description="FLOPs of all passes of the step, all precisions")
    seconds: PositiveFloat = Field(description="shortest duration of the step")
    limited_by: Limit = Field(description="what limits the verify pass")
    tokens_per_second: PositiveFloat = Field(description="highest output rate of the batch")


class AcceptanceLength(Block):
    """Output tokens per decode step and sequence, and its source."""

    value: Annotated[float, Field(ge=1)] | None = Field(description="null if unknown")
    source: str = Field(min_length=1, description="the acceptance record, or why it is assumed or unknown")


class WeightBytes(Block):
    """Bytes of weights by stored dtype."""

    body: BytesByDtype
    head: BytesByDtype
    drafter: BytesByDtype
    tied: bool = Field(description="whether the output head is the embedding")


class Decode(Block):
    """Bounds of decode steps at one draft depth and context length."""

    num_speculative_tokens: NonNegativeInt
    acceptance_length: float = Field(ge=1)
    context_len: PositiveInt = Field(description="cached tokens per sequence")
    weight_bytes_per_step: NonNegativeInt
    single: Bound = Field(description="one sequence")
    batch: Bound = Field(description="as many sequences as are served at once and fit")
    single_over_baseline: PositiveFloat = Field(description="ratio of tokens per second")
    batch_over_baseline: PositiveFloat = Field(description="ratio of tokens per second")


class Prefill(Block):
    """Bound of the pass over one prompt."""

    num_tokens: PositiveInt
    bytes_per_token: NonNegativeFloat
    flops_per_token: NonNegativeFloat
    seconds: PositiveFloat
    tokens_per_second: PositiveFloat
    limited_by: Limit


class Measured(Block):
    """One class of the newest latency record on this GPU, beside its bound."""

    record: str = Field(pattern=r"^[^/]+\.json$")
    class_: str = Field(validation_alias="class", serialization_alias="class", min_length=1)
    prompt_tokens: PositiveInt
    output_tokens: PositiveInt
    concurrency: PositiveInt
    tokens_per_second: NonNegativeFloat = Field(description="measured output rate")
    bound_tokens_per_second: PositiveFloat
    share_of_bound: NonNegativeFloat


class VariantBounds(Block):
    """Bounds of one variant as its config.env serves it."""

    variant: str
    checkpoint: str = Field(min_length=16, description="checkpoint digest")
    weights: WeightBytes
    l2_share: float = Field(ge=0, le=1, description="share of the weights that fits into the L2 cache")
    kv_bytes_per_token: NonNegativeInt
    state_bytes_per_sequence: NonNegativeInt
    max_num_seqs: PositiveInt
    num_speculative_tokens: NonNegativeInt
    acceptance_length: AcceptanceLength
    decode: tuple[Decode, ...] = Field(min_length=1)
    prefill: tuple[Prefill, ...]
    measured: tuple[Measured, ...]

    @property
    def as_served(self) -> list[Decode]:
        """Decode rows at the deepest K with a known acceptance length."""
        depth = self.decode[-1].num_speculative_tokens
        return [row for row in self.decode if row.num_speculative_tokens == depth]


class Roofline(Record):
    """The fastest that variants could run on a GPU by its data sheet; only `measured` was timed."""

    kind = "roofline"
    version = 2
    verb = "analyze roofline"

    gpu: Gpu
    assumptions: tuple[str, ...]
    notes: tuple[str, ...]
    baseline: str
    context_lens: tuple[PositiveInt, ...] = Field(min_length=1)
    variants: tuple[VariantBounds, ...] = Field(min_length=1)

    def tables(self, path: Path) -> list[Table]:
        """Decode, prefill and measured classes."""
        peaks = self.gpu.dense_peak_tflops.model_dump(exclude_none=True)
        sheet = (
            f"{self.gpu.name}: {self.gpu.memory_bandwidth_gb_per_s:g} GB/s, dense peak "
            f"{', '.join(f'{name} {peak:g}' for name, peak in peaks.items())} TFLOP/s ({self.gpu.source})."
        )
        notes = (
            sheet,
            *filter(None, [self.gpu.note]),
            *self.notes,
            f"Assumed: {'; '.join(self.assumptions)}.",
        )
        decode = Table(
            f"Roofline of decoding on {self.gpu.name}",
            (
                "variant", "K", "context", "weights, MB/step", "tokens/s, batch 1", "/ baseline", "batch",
                "tokens/s, batch", "/ baseline", "limited by",
            ),
            tuple(self._decode_rows()),
            notes,
        )  # fmt: skip
        prefill: dict[str, Callable[[tuple[str, Prefill]], object]] = {
            "variant": lambda row: row[0],
            "prompt tokens": lambda row: f"{row[1].num_tokens:,}",
            "ms": lambda row: f"{1000 * row[1].seconds:,.3f}",
            "tokens/s": lambda row: f"{row[1].tokens_per_second:,.0f}",
            "MFLOPs/token": lambda row: f"{row[1].flops_per_token / 1e6:,.1f}",
            "limited by": lambda row: row[1].limited_by,
        }
        measured: dict[str, Callable[[tuple[str, Measured]], object]] = {
            "variant": lambda row: row[0],
            "class": lambda row: row[1].class_,
            "prompt -> output": lambda row: f"{row[1].prompt_tokens} -> {row[1].output_tokens}",
            "concurrency": lambda row: row[1].concurrency,
            "tokens/s": lambda row: f"{row[1].tokens_per_second:,.1f}",
            "roofline": lambda row: f"{row[1].bound_tokens_per_second:,.1f}",
            "share": lambda row: f"{row[1].share_of_bound:.1%}",
        }
        tables = (
            decode,
            Table.from_rows(
                f"Roofline of prefill on {self.gpu.name}",
                [(bounds.variant, row) for bounds in self.variants for row in bounds.prefill],
                prefill,
            ),
            Table.from_rows(
                f"Measured on {self.gpu.name}, as a share of the roofline",
                [(bounds.variant, row) for bounds in self.variants for row in bounds.measured],
                measured,
            ),
        )
        return [table for table in tables if table.rows]

    def _decode_rows(self) -> Iterator[tuple[str, ...]]:
        for variant in self.variants:
            for row in variant.decode:
                yield (
                    variant.variant,
                    str(row.num_speculative_tokens),
                    f"{row.context_len:,}",
                    f"{row.weight_bytes_per_step / 1e6:,.1f}",
                    f"{row.single.tokens_per_second:,.1f}",
                    f"{row.single_over_baseline:.2f}x",
                    str(row.batch.batch_size),
                    f"{row.batch.tokens_per_second:,.1f}",
                    f"{row.batch_over_baseline:.2f}x",
                    row.batch.limited_by,
                )


def _label(variant: VariantBounds) -> str:
    depth = variant.as_served[0].num_speculative_tokens
    return variant.variant + (f", K = {depth}" if depth else "")
