"""The record kind search: every candidate that a search tried, where it ended, and what came out."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, PositiveFloat

from slimqwen.records.provenance import source_notes
from slimqwen.records.record import (
    Block,
    Count,
    Estimate,
    Finding,
    NonNegative,
    Positive,
    Ratio,
    Record,
    VariantName,
)
from slimqwen.records.table import Table
from slimqwen.search.proof import Finalist, Proof

if TYPE_CHECKING:
    pass

Rung = Literal["roofline", "fidelity", "acceptance", "speed"]


class SearchTrial(Block):
    """A candidate, and the rung that it ended at. A figure of a rung that it did not reach is null."""

    number: Count
    name: str = Field(min_length=1, description="Digest of its recipe and flags.")
    changes: dict[str, Any] = Field(description="Levers that differ from the base's.")
    rung: Rung = Field(
        description="Where it ended; in the records of 2026-11-23 fidelity for every crash in an engine."
    )
    reason: str = Field(description="Why it ended there; empty where it passed every rung.")
    crashed: bool = Field(
        description="Whether it ended because something died or raised; such a trial has no score."
    )
    checkpoint_bytes: Count
    bound_tokens_per_second: NonNegative = Field(description="With the acceptance length of the first rung.")
    kl_nats: Estimate | None = None
    fidelity_share: float | None = Field(None, description="Largest fidelity figure as a share of its limit.")
    fidelity_figure: str | None = Field(None, description="Name of that figure.")
    acceptance_length: Estimate | None = Field(None, description="Tokens a draft at the candidate's depth.")
    acceptance_share: Ratio | None = Field(
        None,
        description="Acceptance length / the base's on the same prompts, at the gate's depth; in the records of "
        "2026-11-23T124259Z and before at the candidate's.",
    )
    tokens_per_second: PositiveFloat | None = Field(None, description="Modelled, with the measured length.")
    worst_share: float | None = Field(
        None, description="Largest share of a limit that is used: of fidelity, or of the loss of acceptance."
    )
    seconds: NonNegative = Field(description="In the rungs that need an engine.")

    @property
    def passed(self) -> bool:
        """Whether it passed every rung."""
        return not self.reason

    @property
    def speed(self) -> float:
        """Its tokens per second; 0 where it ended early."""
        return self.tokens_per_second or 0.0

    @property
    def scores(self) -> tuple[float, float, float]:
        """Figures to minimise. PED-ANOVA, too, takes small values as good, so the speed is negative."""
        return -self.speed, self.worst_share or 0.0, float(self.checkpoint_bytes)

    @property
    def label(self) -> str:
        """Its changes, in one line."""
        return ", ".join(f"{lever} {value}" for lever, value in self.changes.items()) or "nothing"


class Incumbent(Block):
    """What candidates have to be faster than."""

    variant: VariantName
    tokens_per_second: PositiveFloat
    acceptance_length: Estimate | None


class Search(Record):
    """The candidates of a search for the fastest variant within a quality budget."""

    kind = "search"
    version = 3
    verb = "search"

    gpu: str = Field(min_length=1, description="Name in eval/devices.yaml.")
    timed: bool = Field(description="Whether speed was measured on that GPU; otherwise it is its roofline's.")
    budget: str = Field(min_length=1, description="eval/gates/<budget>.yaml.")
    space: str = Field(min_length=1, description="Choices and settings, YAML.")
    context_len: Positive = Field(description="Cached tokens of each sequence of the modelled decoding.")
    sequences: Positive
    incumbent: Incumbent
    repeated_suggestions: Count = Field(description="Of candidates known already, answered without a trial.")
    trials: tuple[SearchTrial, ...] = Field(min_length=1)
    importance: dict[str, NonNegative] = Field(
        description="Of each lever for the modelled speed among the trials that passed, by PED-ANOVA; empty where too "
        "few passed."
    )
    proof: Proof | None = Field(default=None, description="Of the finalists; null where there was none.")
    proof_names: dict[str, str] = Field(default={}, description="Name of a trial by the finalist made of it.")

    @property
    def front(self) -> list[SearchTrial]:
        """Trials that no other beats in speed, share of a limit and size, the fastest first."""
        passed = [trial for trial in self.trials if trial.passed]
        best = [trial for trial in passed if not any(_dominates(other, trial) for other in passed)]
        return sorted(best, key=lambda trial: -trial.speed)

    @property
    def faster(self) -> list[SearchTrial]:
        """Trials of the front that are modelled faster than the incumbent."""
        least = self.incumbent.tokens_per_second
        return [trial for trial in self.front if trial.speed > least]

    @property
    def promoted(self) -> list[str]:
        """Finalists that passed their proof, the fastest first."""
        return self.proof.promoted if self.proof else []

    @property
    def advice(self) -> str:
        """The variant to serve, and the reason."""
        incumbent, least = self.incumbent.variant, self.incumbent.tokens_per_second
        where = f"the {self.gpu}" if self.timed else f"the {self.gpu}, as its roofline models it"
        if not self.faster:
            return (
                f"Serve {incumbent}: of {len(self.trials)} candidates none that kept within the limits of "
                f"{self.budget} is faster on {where}."
            )
        if self.promoted:
            name = self.proof_names[self.promoted[0]]
            best = next(trial for trial in self.trials if trial.name == name)
        else:
            within_limits = [trial for trial in self.faster if (trial.worst_share or 0) <= 1]
            best = (within_limits or self.faster)[0]
        facts = (
            f"{best.label}. On {where}, it decodes {best.speed:,.0f} tokens/s, {best.speed / least:.2f} times the "
            f"{least:,.0f} of {incumbent}, with {best.checkpoint_bytes / 1e6:.1f} MB; on the search's items it used "
            f"{best.worst_share:.0%} of the limit that it came nearest to"
        )
        if not self.proof:
            return f"Fastest candidate, not proven: {facts}."
        if not self.promoted:
            return f"Serve {incumbent}: no finalist passed on the items that the search had not seen. Fastest: {facts}."
        (proven,) = (each for each in self.proof.finalists if each.variant == self.promoted[0])
        return (
            f"Serve {proven.variant}, because it is the fastest that passed every check on items that the search had "
            f"not seen (adjusted p-value {proven.adjusted_p_value:.2g}, alpha {self.proof.alpha:g}): {facts}."
        )

    def tables(self, path: Path) -> list[Table]:
        """The front; the proof, where there is one; all trials; what decides their speed."""
        speed = "tokens/s" if self.timed else f"tokens/s (roofline of the {self.gpu})"
        least = self.incumbent.tokens_per_second
        front: dict[str, Callable[[SearchTrial], object]] = {
            "candidate": lambda row: row.label,
            speed: lambda row: f"{row.speed:,.0f}",
            f"times {self.incumbent.variant}": lambda row: f"{row.speed / least:.2f}",
            "acceptance length ± SE": lambda row: _formatted(row.acceptance_length, ".3f"),
            "share of the base's [95 %]": lambda row: _formatted(row.acceptance_share, ".3f"),
            "KL, nats a token ± SE": lambda row: _formatted(row.kl_nats, ".5f"),
            "of a limit": lambda row: _formatted(row.worst_share, ".0%"),
            "MB": lambda row: f"{row.checkpoint_bytes / 1e6:.2f}",
        }
        notes = [
            self.advice,
            f"Modelled at a batch size of {self.sequences}, {self.context_len:,} cached tokens a sequence. Of "
            f"a limit: how much of a limit of {self.budget} a candidate uses, for the figure that comes nearest to its "
            "limit (fidelity, or loss of acceptance length). Above 100 % the estimate is beyond the limit, but not its "
            "whole interval.",
            *source_notes(self, path),
        ]
        if not self.timed:
            notes.insert(1, f"No speed here was measured on a GPU: every one is the {self.gpu}'s roofline.")
        all_trials: dict[str, Callable[[SearchTrial], object]] = {
            "trial": lambda row: row.number,
            "candidate": lambda row: row.label,
            "ended at": lambda row: row.rung,
            "because": lambda row: row.reason or "passed every rung",
            "bound, tokens/s": lambda row: f"{row.bound_tokens_per_second:,.0f}",
            "tokens/s": lambda row: _formatted(row.tokens_per_second, ",.0f"),
            "of a limit": lambda row: _formatted(row.worst_share, ".0%"),
            "s": lambda row: f"{row.seconds:.0f}",
        }
        repeated = f"{self.repeated_suggestions} suggestions were of known candidates."
        tables = [
            Table.from_rows(f"Front of the search from {self.variant}", self.front, front, *notes),
            *([self._proof_table(self.proof)] if self.proof else []),
            Table.from_rows("Trials", self.trials, all_trials, repeated, text_columns=4),
        ]
        if self.importance:
            tables.append(
                Table.from_rows(
                    "What decides the speed of the trials that passed (PED-ANOVA)",
                    sorted(self.importance.items(), key=lambda each: -each[1]),
                    {"lever": lambda row: row[0], "importance for speed": lambda row: f"{row[1]:.2f}"},
                )
            )
        return tables

    def _proof_table(self, proof: Proof) -> Table:
        """Every figure of every finalist on the items that the search never saw."""
        rows = [(finalist, finding) for finalist in proof.finalists for finding in finalist.findings]
        columns: dict[str, Callable[[tuple[Finalist, Finding]], object]] = {
            "finalist": lambda row: row[0].variant,
            "check": lambda row: row[1].gate,
            "figure": lambda row: row[1].figure,
            "value [95 %]": lambda row: _estimate(row[1]),
            "limit": lambda row: f"{row[1].limit:g}",
            "verdict": lambda row: row[1].verdict,
        }
        notes = [
            f"{each.variant} ({self.proof_names.get(each.variant, '?')}): {each.verdict}, adjusted p-value "
            f"{each.adjusted_p_value:.2g}" + (f"; {each.reason}" if each.reason else "")
            for each in proof.finalists
        ]
        return Table.from_rows("Proof of the finalists", rows, columns, *notes, text_columns=3)


def _dominates(first: SearchTrial, second: SearchTrial) -> bool:
    """Whether a trial is at least as good as another in speed, share of a limit and size, and better in one."""
    pairs = list(zip(first.scores, second.scores, strict=True))
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def _formatted(value: float | Estimate | Ratio | None, spec: str) -> str | None:
    return None if value is None else f"{value:{spec}}"


def _estimate(finding: Finding) -> str | None:
    if finding.value is None:
        return None
    interval = "" if finding.low is None else f" [{finding.low:.4g}, {finding.high:.4g}]"
    return f"{finding.value:.4g}{interval}"
