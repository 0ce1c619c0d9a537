"""The record kind search: what each change costs, the candidates of the front that were checked, and the result."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import Field, NonNegativeFloat, PositiveFloat

from slimqwen.records.provenance import source_notes
from slimqwen.records.record import Block, Finding, Record, VariantName, Verdict
from slimqwen.records.table import Table
from slimqwen.report.choice import Case, decide
from slimqwen.search.candidate import Candidate, describe_changes
from slimqwen.search.proof import Finalist, Proof


class Sensitivity(Block):
    """Cost in quality, and saved share of a decode step, of one change made alone to the base."""

    change: str = Field(min_length=1, description="The change in words.")
    kl_nats: NonNegativeFloat | None = Field(
        description="Divergence by rounding to nearest, nats a token; null for a change of the drafts."
    )
    acceptance_share: NonNegativeFloat | None = Field(
        description="Share of the base's acceptance length at the gate's depth; null for a change of the weights."
    )
    saved: float = Field(description="Share of the base's decode step that it saves, by the roofline.")


class Trial(Block):
    """One candidate of a search: its forecast, what was measured, and why it was given up."""

    name: VariantName = Field(description="Its variant.")
    changes: dict[str, Any] = Field(description="Choices that differ from the base's.")
    forecast_kl_nats: NonNegativeFloat | None = Field(
        description="Sum over its changes; null in searches before 2026-11-28, which had none."
    )
    forecast_acceptance_share: NonNegativeFloat | None = Field(description="As forecast_kl_nats.")
    forecast_tokens_per_second: PositiveFloat
    findings: tuple[Finding, ...] = Field(
        description="Figures of the checks that it climbed, on the search's items."
    )
    reason: str = Field(description="Why it ended or is undecided; empty if all that was measured passes.")
    tokens_per_second: PositiveFloat | None = Field(
        description="Roofline by the measured acceptance; null if it failed fidelity or acceptance."
    )
    speedup: PositiveFloat | None = Field(
        default=None, description="Times as fast as the incumbent, timed in turns."
    )

    @property
    def candidate(self) -> Candidate:
        """The candidate that these changes make."""
        return Candidate(**self.changes)

    @property
    def label(self) -> str:
        """The candidate's changes as one line."""
        return describe_changes(self.changes)

    @property
    def kl(self) -> Finding | None:
        """The measured divergence; None if it was not measured."""
        return self._find("fidelity", "kl_nats")

    @property
    def share(self) -> Finding | None:
        """The measured share of the base's acceptance length; None if it was not measured."""
        return self._find("acceptance", "acceptance length")

    @property
    def is_undecided(self) -> bool:
        """Whether a figure did not pass; for a trial that did not fail, its interval then contains the limit."""
        return any(each.verdict != Verdict.PASS for each in self.findings)

    def factor_over(self, tokens_per_second: float) -> float:
        """Speed-up over the incumbent: timed, else by the roofline; 0 if the trial failed.

        Args:
            tokens_per_second: the incumbent's, by the roofline.
        """
        return self.speedup or (self.tokens_per_second or 0.0) / tokens_per_second

    def _find(self, gate: str, figure: str) -> Finding | None:
        found = (each for each in self.findings if each.gate == gate and each.figure.startswith(figure))
        return next(found, None)


class Incumbent(Block):
    """The variant that candidates have to be faster than: the fastest promoted one, else the base."""

    variant: VariantName
    tokens_per_second: PositiveFloat
    acceptance_share: PositiveFloat | None = Field(
        description="Share of the base's acceptance length by its gate; null without drafts, and in old searches."
    )


class Search(Record):
    """The candidates of a search for the fastest variant within a quality budget, and the proof of the winner."""

    kind = "search"
    version = 5
    verb = "search"

    gpu: str = Field(min_length=1, description="Name of the GPU in eval/devices.yaml.")
    budget: str = Field(min_length=1, description="eval/gates/<budget>.yaml.")
    incumbent: Incumbent
    sensitivities: tuple[Sensitivity, ...]
    trials: tuple[Trial, ...] = Field(description="Empty where no candidate of the front may be faster.")
    is_timed: bool = Field(
        description="Whether the GPU was here and finalists were timed; else the roofline decided."
    )
    winner: VariantName | None = Field(
        description="Fastest trial that no check failed; null if there is none."
    )
    proof: Proof | None = Field(description="Proof of the winner on items that the search did not see.")

    @property
    def advice(self) -> str:
        """The variant to serve, and the reason."""
        incumbent, least = self.incumbent.variant, self.incumbent.tokens_per_second
        by = f"timed on the {self.gpu}" if self.is_timed else f"by the roofline of the {self.gpu}"
        if self.proof is None:
            none = (
                f"none of {len(self.trials)} candidates on the front"
                if self.trials
                else "no candidate of the front"
            )
            return f"Serve {incumbent}: {none} kept within the limits of {self.budget} and is faster than it, {by}."
        finalist = max(self.proof.finalists, key=lambda each: each.passed)
        factor = next(each for each in self.trials if each.name == finalist.variant).factor_over(least)
        decision = decide(Case(finalist.variant, incumbent, finalist.verdict, factor > 1))
        if decision.serve != finalist.variant:
            return (
                f"Serve {incumbent}: {finalist.variant}, {factor:.2f} times as fast {by}, is not proven on items that "
                f"the search had not seen ({finalist.reason})."
            )
        return (
            f"Serve {finalist.variant}: it passed every check on items that the search had not seen (p-value "
            f"{finalist.p_value:.2g}, alpha {self.proof.alpha:g}), and {by} it is {factor:.2f} times as fast as "
            f"{incumbent}."
        )

    def tables(self, path: Path) -> list[Table]:
        """Tables of the candidates, of the proof if there is one, and of what each change costs."""
        least = self.incumbent.tokens_per_second
        trials: dict[str, Callable[[Trial], object]] = {
            "candidate": lambda row: row.label,
            "ended because": lambda row: row.reason or None,
            "KL, nats a token: forecast": lambda row: _number(row.forecast_kl_nats, ".5f"),
            "measured [95 %]": lambda row: _format(row.kl, ".5f"),
            "share of the base's acceptance: forecast": lambda row: _number(
                row.forecast_acceptance_share, ".3f"
            ),
            "measured [95 %] ": lambda row: _format(row.share, ".3f"),
            "tokens/s (roofline)": lambda row: (
                f"{row.tokens_per_second or row.forecast_tokens_per_second:,.0f}"
            ),
            f"times {self.incumbent.variant}": lambda row: (
                f"{row.factor_over(least):.2f}" if row.factor_over(least) else None
            ),
        }
        decided = (
            "Finalists were timed in turns."
            if self.is_timed
            else (
                f"Nothing was timed: there is no {self.gpu} here, so the roofline of one sequence decided which is "
                f"faster; that of {self.incumbent.variant} is {least:,.0f} tokens/s."
            )
        )
        changes: dict[str, Callable[[Sensitivity], object]] = {
            "change": lambda row: row.change,
            "KL, nats a token": lambda row: _number(row.kl_nats, ".5f"),
            "share of the base's acceptance": lambda row: _number(row.acceptance_share, ".3f"),
            "of the step saved": lambda row: f"{row.saved:.1%}",
        }
        proof: dict[str, Callable[[Finalist], object]] = {
            "finalist": lambda row: row.variant,
            "because": lambda row: row.reason or "every figure within its limit",
            "verdict": lambda row: row.verdict,
            "p-value": lambda row: f"{row.p_value:.2g}",
        }
        title = f"Candidates on the front of {self.variant} for the {self.gpu}"
        tables = [
            Table.from_rows(
                title, self.trials, trials, self.advice, decided, *source_notes(self, path), text_columns=2
            )
        ]
        if self.proof:
            tables.append(Table.from_rows("Proof of the winner", self.proof.finalists, proof, text_columns=3))
        return [*tables, Table.from_rows("What each change costs alone", self.sensitivities, changes)]


def _number(value: float | None, spec: str) -> str | None:
    return None if value is None else f"{value:{spec}}"


def _format(finding: Finding | None, spec: str) -> str | None:
    if finding is None or finding.value is None:
        return None
    interval = (
        ""
        if finding.low is None or finding.high is None
        else f" [{finding.low:{spec}}, {finding.high:{spec}}]"
    )
    return f"{finding.value:{spec}}{interval}"
