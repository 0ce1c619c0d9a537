"""The record kind lm_head: figures of smaller output heads, with their table and chart panels."""

from itertools import accumulate
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from slimqwen.records.panel import Line, Panel
from slimqwen.records.record import Block, Difference, Estimate, NonNegative, Positive, Record, Share
from slimqwen.records.table import Table


class HeadShape(Block):
    """The output head of the checkpoint."""

    tensor: str = Field(min_length=1)
    tied: bool = Field(description="whether it is the input embedding")
    rows: Positive
    hidden: Positive
    bytes: Positive = Field(description="at 16 bits")


class SmallerHead(Block):
    """Figures of one smaller head."""

    relative_error: NonNegative = Field(description="||W - W'|| / ||W||, Frobenius norms")
    bytes: Positive
    bytes_share: NonNegative = Field(description="share of the 16-bit head's bytes")
    bits_per_byte: Estimate
    bits_per_byte_change: Difference = Field(description="relative to the 16-bit head, paired by document")


class LowRankHead(SmallerHead):
    """The best head of a rank, factors counted at 16 bits and computed in float32."""

    kind: Literal["low_rank"] = "low_rank"
    rank: Positive
    energy: Share = Field(description="share of the squared singular values")

    @property
    def label(self) -> str:
        """Name in tables."""
        return f"rank {self.rank}"


class RoundedHead(SmallerHead):
    """The head rounded to nearest (RTN)."""

    kind: Literal["rounded"] = "rounded"
    bits: Positive
    group: Positive = Field(description="weights of a row that share a scale")

    @property
    def label(self) -> str:
        """Name in tables."""
        return f"{self.bits} bit, groups of {self.group}"


class ScoredTexts(Block):
    """Size of the scored texts."""

    documents: int = Field(ge=2)
    bytes: Positive
    tokens: Positive


class LmHead(Record):
    """Cost of smaller output heads of a variant."""

    kind = "lm_head"
    verb = "analyze lm-head"

    head: HeadShape
    singular_values: tuple[NonNegative, ...] = Field(min_length=1, description="largest first")
    ranks: dict[str, Positive] = Field(description="smallest rank by share of the squared singular values")
    texts: ScoredTexts
    bits_per_byte: Estimate = Field(description="of the 16-bit head")
    groups_left_out: tuple[Positive, ...] = Field(
        description="group sizes that do not divide the hidden size"
    )
    heads: tuple[Annotated[LowRankHead | RoundedHead, Field(discriminator="kind")], ...] = Field(min_length=1)

    def tables(self, path: Path) -> list[Table]:
        """One row per head."""
        full_head = (
            "16 bit",
            "1",
            "0",
            f"{self.head.bytes / 1e6:.2f}",
            "1",
            f"{self.bits_per_byte.value:.4f}",
            "",
        )
        rows = (
            (
                head.label,
                f"{head.energy:.4f}" if isinstance(head, LowRankHead) else "",
                f"{head.relative_error:.4f}",
                f"{head.bytes / 1e6:.2f}",
                f"{head.bytes_share:.3f}",
                f"{head.bits_per_byte.value:.4f}",
                f"{head.bits_per_byte_change.value:+.4f} ± {head.bits_per_byte_change.standard_error:.4f}",
            )
            for head in self.heads
        )
        ranks = ", ".join(f"{float(energy):.0%} at rank {rank}" for energy, rank in self.ranks.items())
        notes = [f"Energy (share of squared singular values): {ranks} of {self.head.hidden}."]
        if self.groups_left_out:
            sizes = ", ".join(map(str, self.groups_left_out))
            notes.append(f"Group sizes left out because they do not divide {self.head.hidden}: {sizes}.")
        columns = ("head", "energy", "error", "MB", "of 16 bit", "bits/byte", "change ± SE")
        return [Table(f"Output heads of {self.variant}", columns, (full_head, *rows), tuple(notes))]

    def panels(self) -> list[Panel]:
        """Spectrum and energy by rank, and change of bits per byte by size."""
        values = self.singular_values
        ranks = list(range(1, len(values) + 1))
        total = sum(value**2 for value in values)
        energy = [share / total for share in accumulate(value**2 for value in values)]
        heads: dict[str, list[LowRankHead | RoundedHead]] = {
            "low rank, 16 bit": [head for head in self.heads if head.kind == "low_rank"],
            "4 bit": [head for head in self.heads if head.kind == "rounded"],
        }
        changes = [
            Line(
                label,
                [head.bytes / 1e6 for head in members],
                [head.bits_per_byte_change.value for head in members],
                [head.bits_per_byte_change.standard_error for head in members],
            )
            for label, members in heads.items()
            if members
        ]
        return [
            Panel(
                "rank",
                "share",
                [
                    Line("singular value / largest", ranks, [value / values[0] for value in values]),
                    Line("energy", ranks, energy),
                ],
            ),
            Panel(
                "head, MB",
                "change of bits per byte (bars: 1 SE)",
                [*changes, Line("16 bit", [self.head.bytes / 1e6], [0.0])],
            ),
        ]
