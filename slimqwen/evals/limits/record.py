"""The record of a model's limits, and how limits follow from the noise of its baseline."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from slimqwen.evals.fidelity_figures import FIGURE_NAMES, Figures
from slimqwen.evals.limits.settings import LimitsSettings
from slimqwen.records import provenance
from slimqwen.records.collection import Collection
from slimqwen.records.record import Block, Count, Estimate, NonNegative, Positive, Record, Share, Table
from slimqwen.stats import noise
from slimqwen.stats.intervals import Ratio, Z

_DIGITS = 2
"""Significant digits of a written limit."""


class RepeatSummary(Block):
    """One engine in which the baseline was compared with itself."""

    repeat: str = Field(min_length=1)
    flags: dict[str, Any] = Field(description="vLLM's flags that replace the baseline's own.")
    kl_nats: NonNegative = Field(description="Mean KL to the checkpoint in float32, nats a token.")
    acceptance_length: NonNegative = Field(description="At the gate's depth, tokens.")
    answers: Count = Field(description="Greedy answers compared with the reference engine's.")
    differing: Count = Field(description="Answers with another token.")
    largest_gap_shift_nats: NonNegative


class Limit(Block):
    """One limit, and the noise that it follows from."""

    file: Literal["fidelity", "acceptance", "engine"] = Field(
        description="Folder of eval/ whose settings hold it."
    )
    figure: str = Field(min_length=1, description="Name in that file.")
    limit: float = Field(description="As it is written: rounded outwards to two significant digits.")
    low: float = Field(description="Lower end of the limit's 95 % interval.")
    high: float = Field(description="Upper end of the limit's 95 % interval.")
    noise: float = Field(description="The noise that it follows from.")
    rule: str = Field(min_length=1, description="How it follows.")
    committed: float | None = Field(description="The limit in eval/ at that time; null without that file.")

    @property
    def reproduced(self) -> bool | None:
        """Whether the committed limit lies in the interval; None without one."""
        return None if self.committed is None else self.low <= self.committed <= self.high


class LimitsRecord(Record):
    """Limits of the gate for the models of an EVALUATION, from the noise of a baseline."""

    kind = "limits"
    verb = "limits"

    evaluation: str = Field(min_length=1, description="Name of the files in eval/.")
    repeats: tuple[RepeatSummary, ...] = Field(min_length=5)
    rounded: Count = Field(
        description="Linears that were rounded to 4 bits for the limits of changed weights."
    )
    limits: tuple[Limit, ...] = Field(min_length=1)
    depth: Positive = Field(description="Tokens drafted at a time (K).")
    gap_share: Share = Field(description="Share of positions whose gap moves by less than near_tie_nats.")
    positions: Positive = Field(description="Positions at which the gap was compared, over all repeats.")

    def finding(self, path: Path, records: Collection) -> str:
        """How many committed limits the measurement reproduces."""
        compared = [each for each in self.limits if each.committed is not None]
        if not compared:
            return f"{len(self.limits)} limits from the noise of {len(self.repeats)} repeats"
        outside = [
            f"{each.figure} {each.committed:g} (measured {each.limit:g} [{each.low:.3g}, {each.high:.3g}])"
            for each in compared
            if not each.reproduced
        ]
        count = len(compared) - len(outside)
        exceptions = f"; not {', '.join(outside)}" if outside else ""
        return f"{count} of {len(compared)} committed limits reproduced{exceptions}"

    def tables(self, path: Path) -> list[Table]:
        """One row per limit; then one row per repeat."""
        limits: dict[str, Callable[[Limit], object]] = {
            "file": lambda row: f"eval/{row.file}",
            "figure": lambda row: row.figure,
            "noise": lambda row: f"{row.noise:.3g}",
            "limit": lambda row: f"{row.limit:g}",
            "95 % interval": lambda row: f"{row.low:.3g} to {row.high:.3g}",
            "committed": lambda row: None if row.committed is None else f"{row.committed:g}",
            "reproduced": lambda row: {True: "yes", False: "no", None: None}[row.reproduced],
        }
        repeats: dict[str, Callable[[RepeatSummary], object]] = {
            "repeat": lambda row: row.repeat,
            "KL, nats a token": lambda row: f"{row.kl_nats:.3g}",
            "acceptance length": lambda row: f"{row.acceptance_length:.3f}",
            "answers": lambda row: row.answers,
            "another token": lambda row: row.differing,
            "largest gap shift, nats": lambda row: f"{row.largest_gap_shift_nats:.3f}",
        }
        rules = [f"{rule}." for rule in dict.fromkeys(each.rule for each in self.limits)]
        source = provenance.source_note(self, path)
        return [
            Table.from_rows(
                f"Limits of {self.evaluation} from the noise of {self.variant}",
                self.limits,
                limits,
                *rules,
                source,
                text_columns=2,
            ),
            Table.from_rows(f"Repeats of {self.variant} against itself", self.repeats, repeats, source),
        ]


def same_weights(
    settings: LimitsSettings, repeats: Sequence[Figures], committed: dict[str, float]
) -> list[Limit]:
    """Limits of fidelity for unchanged weights, from the baseline against itself in float32."""
    rule = (
        f"same_weights: {settings.noise_factor:g} times the largest noise of the repeats, or the tolerance bound of "
        "the upper ends of their intervals over texts (95 % of repeats with 95 % confidence) where that is larger"
    )
    limits = []
    for figure in FIGURE_NAMES:
        estimates = [_estimate(figures, figure) for figures in repeats]
        worst = max(estimates, key=lambda each: abs(each.value))
        bound = noise.upper_tolerance_bound([_reach(each) for each in estimates])
        # The gate compares the joined text, which has no interval, with the same limit.
        joined = [each.joined_kl_nats for each in repeats if figure == "kl_nats" and each.joined_kl_nats]
        largest = max(abs(worst.value), *joined, 0.0)
        limits.append(
            Limit(
                file="fidelity",
                figure=f"same_weights.{figure}",
                limit=rounded_up(max(settings.noise_factor * largest, bound)),
                low=settings.noise_factor * max(0.0, abs(worst.value) - Z * worst.standard_error),
                high=max(settings.noise_factor * max(_reach(worst), largest), bound),
                noise=largest,
                rule=rule,
                committed=committed.get(f"same_weights.{figure}"),
            )
        )
    return limits


def changed_weights(
    settings: LimitsSettings, figures: Figures, suite_margin: float | None, committed: dict[str, float]
) -> list[Limit]:
    """Limits of fidelity for changed weights.

    Args:
        figures: the baseline with its MLPs rounded to 4 bits.
        suite_margin: non-inferiority margin of bits per byte, which is its limit; None where the suite has none.
    """
    limits = []
    for figure in FIGURE_NAMES:
        estimate = _estimate(figures, figure)
        factor = settings.changed_factor
        limit = {
            "limit": rounded_up(factor * abs(estimate.value)),
            "low": factor * max(0.0, abs(estimate.value) - Z * estimate.standard_error),
            "high": factor * _reach(estimate),
        }
        rule = (
            f"changed_weights: {factor:g} times what round-to-nearest of the MLPs to 4 bits, groups of "
            f"{settings.group_size}, costs"
        )
        if figure == "bits_per_byte" and suite_margin is not None:
            limit = dict.fromkeys(limit, suite_margin)
            rule = "changed_weights.bits_per_byte: the suite's non-inferiority margin"
        limits.append(
            Limit(
                file="fidelity",
                figure=f"changed_weights.{figure}",
                **limit,
                noise=abs(estimate.value),
                rule=rule,
                committed=committed.get(f"changed_weights.{figure}"),
            )
        )
    return limits


def least_share(settings: LimitsSettings, ratios: Sequence[Ratio], committed: float | None) -> Limit:
    """The least share of the baseline's acceptance length that passes.

    Args:
        ratios: acceptance length of each further repeat over that of the first, with intervals over groups.
    """
    bound = noise.lower_tolerance_bound([ratio.low for ratio in ratios])
    limit = min(settings.least_share, math.floor(bound * 100) / 100)
    return Limit(
        file="acceptance",
        figure="least_share",
        limit=limit,
        low=limit,
        high=max(limit, bound),
        noise=max(abs(1 - ratio.value) for ratio in ratios),
        rule=f"least_share: {settings.least_share:g}, or the tolerance bound of the lower ends of the intervals of "
        "the repeats' acceptance lengths over the first's where that is lower",
        committed=committed,
    )


def near_tie(settings: LimitsSettings, shifts: Sequence[float], committed: float | None) -> Limit:
    """The log-probability gap below which either token is correct.

    Args:
        shifts: how far the gap moved at each position of all repeats, nats.
    """
    quantile, low, high = noise.quantile_interval(shifts, settings.gap_share)
    return Limit(
        file="engine",
        figure="near_tie_nats",
        limit=rounded_up(high),
        low=low,
        high=rounded_up(high),
        noise=quantile,
        rule=f"near_tie_nats: upper end of the interval of the {settings.gap_share:.1%} quantile of how far the gap of "
        "the reference engine's two likeliest tokens moves",
        committed=committed,
    )


def rounded_up(value: float) -> float:
    """A positive number rounded up to two significant digits; 0 for any other."""
    if value <= 0:
        return 0.0
    exponent = math.floor(math.log10(value)) - (_DIGITS - 1)
    digits = math.ceil(round(value / 10**exponent, 6))
    return float(f"{digits}e{exponent}")


def _estimate(figures: Figures, name: str) -> Estimate:
    estimate: Estimate | None = getattr(figures, name)
    assert estimate is not None, "the settings name two texts or more, and the baseline keeps every token"
    return estimate


def _reach(estimate: Estimate) -> float:
    """Distance from zero to the farther end of an estimate's interval."""
    return abs(estimate.value) + Z * estimate.standard_error
