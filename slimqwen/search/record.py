"""The record kind search: every candidate that a search tried, the rung at which it ended, and the result."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveFloat

from slimqwen.records.provenance import source_notes
from slimqwen.records.record import Block, Count, Estimate, NonNegative, Positive, Ratio, Record, VariantName
from slimqwen.records.table import Table
from slimqwen.report.choice import Case, decide
from slimqwen.search.candidate import describe_changes
from slimqwen.search.proof import Finalist, Proof

Rung = Literal["roofline", "fidelity", "acceptance", "speed"]
RUNGS: tuple[Rung, ...] = ("roofline", "fidelity", "acceptance", "speed")


class SearchTrial(Block):
    """A candidate, and the rung at which it ended. Figures of rungs that it did not reach are null."""

    number: Count
    name: str = Field(min_length=1, description="Variant of the candidate; a finalist's is in experiments/.")
    changes: dict[str, Any] = Field(description="Choices that differ from the base's.")
    rung: Rung = Field(
        description="Rung at which it ended; records of 2026-11-23 name fidelity for any crash of an engine."
    )
    reason: str = Field(description="Why it ended there; empty if it passed every rung.")
    crashed: bool = Field(description="Whether a task died or raised; such a trial has no score.")
    checkpoint_bytes: Count
    bound_tokens_per_second: NonNegative = Field(
        description="Roofline by the first rung's acceptance length."
    )
    kl_nats: Estimate | None = None
    fidelity_share: float | None = Field(None, description="Largest fidelity figure as a share of its limit.")
    fidelity_figure: str | None = Field(None, description="Name of that figure.")
    acceptance_length: Estimate | None = Field(None, description="Tokens per verify step at its depth.")
    acceptance_share: Ratio | None = Field(
        None, description="Acceptance length over the base's on the same prompts, at the gate's depth."
    )
    tokens_per_second: PositiveFloat | None = Field(None, description="Roofline by the measured length.")
    worst_share: float | None = Field(
        None, description="Largest share of a limit that is used: of fidelity, or of the loss of acceptance."
    )
    seconds: NonNegative = Field(description="Time in the rungs that need an engine.")

    @property
    def passed(self) -> bool:
        """Whether the candidate passed every rung."""
        return not self.reason

    @property
    def speed(self) -> float:
        """Tokens per second; 0 if the candidate ended before the last rung."""
        return self.tokens_per_second or 0.0

    @property
    def scores(self) -> tuple[float, float, float]:
        """Figures to minimise: negative speed, largest used share of a limit, size in bytes."""
        return -self.speed, self.worst_share or 0.0, float(self.checkpoint_bytes)

    @property
    def label(self) -> str:
        """The candidate's changes as one line."""
        return describe_changes(self.changes)


class Incumbent(Block):
    """The variant that candidates have to be faster than."""

    variant: VariantName
    tokens_per_second: PositiveFloat
    acceptance_length: Estimate | None


class Search(Record):
    """The candidates of a search for the fastest variant within a quality budget, by the roofline of a GPU."""

    kind = "search"
    version = 4
    verb = "search"

    gpu: str = Field(min_length=1, description="Name of the GPU in eval/devices.yaml.")
    budget: str = Field(min_length=1, description="eval/gates/<budget>.yaml.")
    space: str = Field(min_length=1, description="Choices and settings of the space, as YAML.")
    context_len: Positive = Field(description="Cached tokens of each sequence of the modelled decoding.")
    sequences: Positive
    incumbent: Incumbent
    trials: tuple[SearchTrial, ...] = Field(min_length=1)
    proof: Proof | None = Field(default=None, description="Proof of the finalists; null without one.")

    @property
    def front(self) -> list[SearchTrial]:
        """Pareto front: trials that no other trial beats in speed, share of a limit and size, the fastest first."""
        passed = [trial for trial in self.trials if trial.passed]
        best = [trial for trial in passed if not any(_dominates(other, trial) for other in passed)]
        return sorted(best, key=lambda trial: -trial.speed)

    @property
    def faster(self) -> list[SearchTrial]:
        """Trials of the front whose modelled speed is above the incumbent's."""
        return [trial for trial in self.front if trial.speed > self.incumbent.tokens_per_second]

    @property
    def advice(self) -> str:
        """The variant to serve, and the reason."""
        incumbent, least = self.incumbent.variant, self.incumbent.tokens_per_second
        if not self.faster:
            return (
                f"Serve {incumbent}: of {len(self.trials)} candidates none that kept within the limits of "
                f"{self.budget} is faster by the roofline of the {self.gpu}."
            )
        within_limits = [trial for trial in self.faster if (trial.worst_share or 0) <= 1]
        fastest = (within_limits or self.faster)[0]
        if not self.proof:
            factor = (
                f"{fastest.speed / least:.2f} times as fast as {incumbent} by the roofline of the {self.gpu}"
            )
            return f"Fastest candidate, not proven: {fastest.label}; {factor}."
        speeds = {trial.name: trial.speed for trial in self.trials}
        proven = next((each for each in self.proof.finalists if self._is_served(each, speeds)), None)
        if not proven:
            return f"Serve {incumbent}: no finalist passed on items that the search had not seen."
        speed = speeds[proven.variant] / least
        return (
            f"Serve {proven.variant}: it passed every check on items that the search had not seen (adjusted p-value "
            f"{proven.adjusted_p_value:.2g}, alpha {self.proof.alpha:g}), and by the roofline of the {self.gpu} it is "
            f"{speed:.2f} times as fast as {incumbent}."
        )

    def _is_served(self, finalist: Finalist, speeds: Mapping[str, float]) -> bool:
        """Whether a finalist is to be served, by the rule of all verbs; its speed is modelled."""
        incumbent = self.incumbent
        is_faster = speeds[finalist.variant] > incumbent.tokens_per_second
        return (
            decide(Case(finalist.variant, incumbent.variant, finalist.verdict, is_faster)).serve
            == finalist.variant
        )

    def tables(self, path: Path) -> list[Table]:
        """Tables of the front, of the proof if there is one, and of how many candidates ended at each rung."""
        least = self.incumbent.tokens_per_second
        front: dict[str, Callable[[SearchTrial], object]] = {
            "candidate": lambda row: row.label,
            f"tokens/s (roofline of the {self.gpu})": lambda row: f"{row.speed:,.0f}",
            f"times {self.incumbent.variant}": lambda row: f"{row.speed / least:.2f}",
            "acceptance length ± SE": lambda row: _format(row.acceptance_length, ".3f"),
            "share of the base's [95 %]": lambda row: _format(row.acceptance_share, ".3f"),
            "KL, nats a token ± SE": lambda row: _format(row.kl_nats, ".5f"),
            "of a limit": lambda row: _format(row.worst_share, ".0%"),
            "MB": lambda row: f"{row.checkpoint_bytes / 1e6:.2f}",
        }
        notes = [
            self.advice,
            f"No speed here was measured: it is modelled at a batch size of {self.sequences}, {self.context_len:,} "
            f"cached tokens a sequence. Of a limit: how much of a limit of {self.budget} a candidate uses, for the "
            "figure nearest to it. Above 100 % the estimate is beyond the limit, but not its whole interval.",
            *source_notes(self, path),
        ]
        ended: dict[str, Callable[[Rung], object]] = {
            "rung": lambda rung: rung,
            "for instance": lambda rung: next((trial.reason for trial in self._ended_at(rung)), "") or None,
            "ended there": lambda rung: len(self._ended_at(rung)),
            "crashed": lambda rung: sum(trial.crashed for trial in self._ended_at(rung)),
        }
        proof: dict[str, Callable[[Finalist], object]] = {
            "finalist": lambda row: row.variant,
            "because": lambda row: row.reason or "every figure within its limit",
            "verdict": lambda row: row.verdict,
            "adjusted p-value": lambda row: f"{row.adjusted_p_value:.2g}",
        }
        return [
            Table.from_rows(f"Front of the search from {self.variant}", self.front, front, *notes),
            *(
                [Table.from_rows("Proof of the finalists", self.proof.finalists, proof, text_columns=3)]
                if self.proof
                else []
            ),
            Table.from_rows("Where the candidates ended", RUNGS, ended, text_columns=2),
        ]

    def _ended_at(self, rung: Rung) -> list[SearchTrial]:
        return [trial for trial in self.trials if trial.rung == rung]


def _dominates(first: SearchTrial, second: SearchTrial) -> bool:
    """Whether `first` is at least as good as `second` in speed, share of a limit and size, and better in one."""
    pairs = list(zip(first.scores, second.scores, strict=True))
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def _format(value: float | Estimate | Ratio | None, spec: str) -> str | None:
    return None if value is None else f"{value:{spec}}"
