"""Redistillation: how a variant's MTP head learned from the target's outputs, and which head was kept."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from slimqwen.evals import EvalError
from slimqwen.recipe.stages.redistill_mtp import CURVE
from slimqwen.records import provenance, store
from slimqwen.records.collection import Collection
from slimqwen.records.record import Block, Count, NonNegative, Positive, Record, Share, Table
from slimqwen.variant import Variant


class DraftAcceptance(Block):
    """Acceptance of drafts of held-out continuations."""

    depth: Positive = Field(description="Tokens drafted at a time (K).")
    drafts: Positive
    accepted_per_position: tuple[Count, ...] = Field(min_length=1)
    mean_length: float = Field(ge=1, description="Acceptance length, 1 + accepted / drafts, tokens.")
    standard_error: NonNegative = Field(description="Texts are the units.")
    rates: tuple[Share, ...] = Field(min_length=1)


class LearningPoint(Block):
    """One point of the learning curve."""

    step: Count
    training_loss: float | None = Field(
        description="Nats a token since the last point; null before the first step."
    )
    validation_loss: float = Field(description="Nats a token.")


class Redistillation(Record):
    """How a variant's MTP head learned from what the target writes, and whether it was kept."""

    kind = "redistill_mtp"
    verb = "recipe redistill"

    parameters: dict[str, str | int | float | bool | None] = Field(
        description="Of the recipe's stage, resolved; its own code says what each is."
    )
    kept: Literal["trained", "original"]
    before: DraftAcceptance
    after: DraftAcceptance
    acceptance_length_before: float = Field(ge=1)
    acceptance_length_after: float = Field(ge=1)
    acceptance_length_before_vllm: float = Field(ge=1, description="Counted by vLLM.")
    acceptance_length_kept_vllm: float = Field(ge=1, description="Counted by vLLM, of the kept head.")
    learning_curve: tuple[LearningPoint, ...] = Field(min_length=1)

    def finding(self, path: Path, records: Collection) -> str:
        """The head that was kept, and the acceptance length of both."""
        lengths = (
            f"{name} {acceptance.mean_length:.3f} ± {acceptance.standard_error:.3f}"
            for name, acceptance in (("before", self.before), ("after", self.after))
        )
        return f"kept {self.kept}, acceptance length {', '.join(lengths)}"

    def tables(self, path: Path) -> list[Table]:
        """Acceptance lengths before and after training."""
        columns: dict[str, Callable[[tuple[str, DraftAcceptance]], object]] = {
            "head": lambda row: row[0],
            "acceptance length ± SE": lambda row: f"{row[1].mean_length:.3f} ± {row[1].standard_error:.3f}",
            "accepted up to each position": lambda row: " ".join(f"{rate:.2f}" for rate in row[1].rates),
        }
        title = f"Redistilled MTP head of {self.variant}; kept: the {self.kept} head"
        return [Table.from_rows(title, [("original", self.before), ("trained", self.after)], columns)]


def write_record(variant: Variant, *, command: Sequence[str], started: str) -> Path:
    """Write the record of a variant's redistilled MTP head, after its recipe has run.

    Args:
        started: `provenance.utc_now()` before the recipe ran.

    Raises:
        EvalError: the recipe has no stage redistill_mtp.
    """
    file = variant.weights / CURVE
    if not file.is_file():
        raise EvalError(
            f"the recipe of {variant.name} has no stage redistill_mtp; add one, or choose another variant"
        )
    results = json.loads(file.read_text(encoding="utf-8"))
    del results["schema"]
    record = Redistillation(
        variant=variant.name,
        **results,
        provenance=provenance.of_variant(variant, command, started),
    )
    return store.write(variant.root / "results", record)
