"""The schema of a field report: timings of one machine in a file without private text, which its owner may send.

Its texts are only names that this project ships, versions and names of products. No pattern allows a slash, a colon or
an "at" sign, so that no path, address or key fits in. Names of own variants are replaced by digests.
"""

from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from slimqwen.records.record import Block, Count, NonNegative, Positive, Sha256, VersionedFile
from slimqwen.stats.verdict import Verdict

Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._+()-]*$", max_length=60)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=60)]
AboveZero = Annotated[float, Field(gt=0)]

_TOLERANCE = 0.1
"""By how much steps, tokens per step and tokens may disagree; committed records: up to 4 %."""

_OVERLAP = 1.25
"""Largest output rate allowed, over requests in flight / mean TPOT: a mean of rates exceeds the rate of a mean."""


class FieldCard(Block):
    """The GPUs or CPUs of the machine that measured."""

    name: Word = Field(description="Short name in eval/devices.yaml, else the driver's; cpu and its kind.")
    count: Positive = Field(description="GPUs, or CPUs that the engine may use.")
    memory_gib: AboveZero = Field(description="Of a GPU; of the machine for a CPU.")
    power_limit_w: AboveZero | None = Field(description="When the report was made; null if not stated.")
    driver: Word | None = Field(description="null for a CPU.")
    system: Word = Field(description="Distribution, its version, and the kernel's major and minor version.")


class FieldStart(Block):
    """How the variant's last server start on this machine differed from its plan."""

    facts: Positive
    differences: tuple[Word, ...] = Field(description="Names of the facts that were not as planned.")


class FieldRow(Block):
    """Newest timing of one variant with one prompt class of a workload."""

    variant: Name
    baseline: Name | None
    checkpoint: Sha256 = Field(description="Recipe key of the checkpoint, else its digest.")
    measured: str = Field(pattern=r"^\d{4}-\d{2}-\d{2}$", description="Day, UTC.")
    commit: Annotated[str, Field(pattern=r"^[0-9a-f]{10}$")] | None
    changed: bool | None = Field(description="Whether files differed from the commit.")
    vllm: Word | None
    torch: Word | None
    workload: Word = Field(description="Name in eval/workloads/.")
    prompt_class: Word
    concurrency: Positive | None = Field(description="Most requests in flight; null without a limit.")
    prompt_tokens: Positive
    output_tokens: Annotated[int, Field(ge=2)]
    rounds: Positive
    requests: Positive
    failures: Count
    ttft_ms: NonNegative = Field(description="Median.")
    tpot_ms: AboveZero = Field(description="Mean.")
    tokens_per_s: AboveZero = Field(description="Output tokens of all requests over the duration.")
    tokens_per_step: float = Field(ge=1, description="Acceptance length; 1 without drafts.")
    drafted_per_step: NonNegative = Field(description="Drafted tokens of a verify step; 0 without drafts.")
    steps_per_s: AboveZero | None = Field(description="Verify steps of all requests; null without drafts.")
    start: FieldStart | None
    gate: Verdict | None = Field(description="Of the newest gate of this checkpoint; null without one.")

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        drafted = self.drafted_per_step
        if self.tokens_per_step > 1 + drafted:
            raise ValueError(f"{self.tokens_per_step:g} tokens a step of {drafted:g} drafted ones")
        if (self.steps_per_s is None) != (drafted == 0):
            raise ValueError("either drafts or no steps/s")
        if self.steps_per_s is not None:
            made = self.tokens_per_step * self.steps_per_s
            # The first token of a request is of no verify step, and its last step may have drafts beyond its end.
            least = self.tokens_per_s * (1 - 1 / self.output_tokens) * (1 - _TOLERANCE)
            most = self.tokens_per_s * (1 + drafted / self.output_tokens) * (1 + _TOLERANCE)
            if not least <= made <= most:
                raise ValueError(
                    f"{self.tokens_per_step:g} tokens a step x {self.steps_per_s:g} steps/s is {made:.4g} tokens/s, "
                    f"not {self.tokens_per_s:g}"
                )
        rate = 1000 / self.tpot_ms * (self.concurrency or 0)
        if self.concurrency and self.tokens_per_s > _OVERLAP * rate:
            raise ValueError(f"{self.tokens_per_s:g} tokens/s at a TPOT of {self.tpot_ms:g} ms")
        return self


class FieldReport(VersionedFile):
    """The newest timings of one machine, one row for each variant, workload and prompt class."""

    kind: ClassVar = "field_report"

    card: FieldCard
    rows: tuple[FieldRow, ...] = Field(min_length=1)
