"""The record kind tune: the ways to speculate and the serving flags (arms) that were tried, and whether they pay."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, PositiveFloat

from slimqwen.records.provenance import hardware_name, source_notes
from slimqwen.records.record import Block, Count, NonNegative, Positive, Ratio, ServedRecord, Table
from slimqwen.stats.verdict import Verdict


class LoadFigures(Block):
    """Figures of an arm at one load, over all of its rounds."""

    tokens_per_second: PositiveFloat = Field(description="Output tokens per second over all requests.")
    ttft_ms: NonNegative = Field(description="Median time to first token.")
    speedup: Ratio | None = Field(
        description="Tokens per second over those of the reference arm in the same rounds; null for that arm."
    )
    acceptance_length: float | None = Field(ge=1, description="1 + accepted / drafts; null without drafts.")


class TunedArm(Block):
    """An arm with its figures, and why its measurement ended."""

    name: str = Field(min_length=1)
    speculation: dict[str, Any] | None = Field(description="vLLM's speculative config; null without drafts.")
    ended: str = Field(description="Why the arm was ended early; empty if it was measured to the end.")
    rounds: Count
    speedup: Ratio | None = Field(
        description="Geometric mean over the loads, paired by round; null for fewer than two rounds or the reference."
    )
    loads: dict[str, LoadFigures] = Field(
        description="Figures by the number of concurrent requests, or of `sessions` of an agent."
    )
    kv_tokens: Count | None = Field(description="Tokens that the KV cache holds; null if unknown.")
    near_ties: Count = Field(description="Greedy responses that differ only by a near tie.")
    changes: dict[str, str] = Field(default={}, description="config.env lines of changed serving flags.")
    needs_gate: bool = Field(
        default=False,
        description="A change rounds numbers otherwise, so responses were not compared: the gate says what it loses.",
    )

    @property
    def speed(self) -> float:
        """Speed-up over the reference arm over all loads; 1 for that arm, 0 if nothing was measured."""
        ratios = [each.speedup.value if each.speedup else 1.0 for each in self.loads.values()]
        return statistics.geometric_mean(ratios) if ratios else 0.0


class FlagContest(Block):
    """Changes of serving flags, measured in turns with the reference arm."""

    reference: str = Field(min_length=1, description="Name of the arm that is changed.")
    arms: tuple[TunedArm, ...] = Field(min_length=1)
    verdict: Verdict = Field(
        description="pass: an arm is surely faster than the reference; fail: none is; inconclusive: more turns are "
        "needed."
    )

    @property
    def fastest(self) -> TunedArm | None:
        """The fastest changed arm; None if none was measured."""
        measured = [arm for arm in self.arms if arm.name != self.reference and arm.loads]
        return max(measured, key=lambda arm: arm.speed, default=None)


class Tune(ServedRecord):
    """The ways to speculate for a variant on one machine and its serving flags, each measured in turns."""

    kind = "tune"
    verb = "tune"
    units: ClassVar[Mapping[str, str]] = {"kv_tokens": "tokens"}

    workload: str = Field(min_length=1)
    temperature: NonNegative = Field(description="Temperature of the timed requests.")
    near_tie_nats: NonNegative | None = Field(
        description="Log-probability gap of the plain engine up to which either token is correct; null where responses "
        "were not compared, because the weights are random."
    )
    sequences: Positive | None = Field(
        description="max_num_seqs of every arm; null if the variant's own is large enough for every load."
    )
    arms: tuple[TunedArm, ...] = Field(
        min_length=1, description="Arms that were measured to the end first, the fastest first."
    )
    flags: tuple[FlagContest, ...] = Field(
        default=(),
        max_length=2,
        description="Serving flags: first one change at a time, then the union of what paid; empty if none were tried.",
    )
    chosen: str | None = Field(description="Arm to serve; null if the verdicts are inconclusive.")
    lines: dict[str, str] = Field(
        description="config.env lines of the chosen arm that the variant lacks, in shell quotes; an empty one unsets."
    )
    verdict: Verdict = Field(
        description="pass: drafts pay, the whole interval is above 1; fail: they do not, it is below 1."
    )

    @property
    def is_decided(self) -> bool:
        """Whether the verdicts are final, so that more minutes would change nothing."""
        return Verdict.INCONCLUSIVE not in (self.verdict, *(each.verdict for each in self.flags))

    @property
    def winner(self) -> TunedArm | None:
        """The chosen arm with its figures; None if no arm was chosen."""
        contests = (*(each.arms for each in reversed(self.flags)), self.arms)
        return next((arm for arms in contests for arm in arms if arm.name == self.chosen), None)

    @property
    def fastest(self) -> TunedArm | None:
        """The fastest arm with drafts; None if no arm with drafts was measured."""
        return next((arm for arm in self.arms if arm.speculation and arm.loads), None)

    @property
    def advice(self) -> list[str]:
        """Sentences: whether drafts and flags pay, over all loads and at each, and the config.env lines to write."""
        sentences = [*self._advise_drafts(), *self._advise_flags()]
        if not self.is_decided:
            sentences.append("The same command with more --minutes continues.")
        if self.chosen is not None and (self.fastest or self.flags):
            lines = " ".join(f"{key}={value}" for key, value in self.lines.items())
            sentences.append(f"Write into config.env: {lines}" if lines else "Its config.env stays as it is.")
        return sentences

    def _advise_flags(self) -> list[str]:
        if not self.flags:
            return []
        last = self.flags[-1]
        fastest, tried = last.fastest, len(self.flags[0].arms) - 1
        if last.verdict == Verdict.INCONCLUSIVE:
            return [f"Not decided: which of {tried} serving flags pay beside {last.reference}."]
        if last.verdict == Verdict.FAIL or fastest is None:
            return [f"No serving flag pays beside {last.reference}: {tried} were tried."]
        sentences = [
            f"Flags pay: {fastest.name} is {fastest.speedup:.2f} times as fast as {last.reference} over the loads "
            f"{', '.join(fastest.loads)}."
        ]
        if self.winner and self.winner.needs_gate:
            sentences.append(f"{self.chosen} needs the gate: it rounds numbers otherwise.")
        return sentences

    def _advise_drafts(self) -> list[str]:
        fastest = self.fastest
        if fastest is None:
            return [f"Nothing that drafts could be measured, so {self.variant} is served without drafts."]
        speed = f"{fastest.speedup:.2f}" if fastest.speedup else f"{fastest.speed:.2f} (a single round)"
        found = {
            Verdict.PASS: f"Drafts pay: {fastest.name} is {speed} times as fast as no drafts",
            Verdict.FAIL: f"Drafts do not pay here: the fastest, {fastest.name}, is {speed} times as fast as none",
            Verdict.INCONCLUSIVE: f"Not decided: the fastest, {fastest.name}, is {speed} times as fast as none",
        }
        over = f" over the loads {', '.join(fastest.loads)}" if len(fastest.loads) > 1 else ""
        sentences = [f"{found[self.verdict]}{over}."]
        if len(fastest.loads) > 1:
            sentences += [self._advise_load(load) for load in fastest.loads]
        close = [
            arm.name
            for arm in self.arms
            if arm is not fastest and not arm.ended and arm.speedup and fastest.speedup
            if arm.speedup.high >= fastest.speedup.low
        ]
        if close and self.verdict == Verdict.PASS:
            sentences.append(f"Perhaps as fast as {fastest.name}: {', '.join(close)}.")
        return sentences

    def _advise_load(self, load: str) -> str:
        """Sentence about the fastest arm at a load, and whether it is surely faster than no drafts."""
        measured = [(arm.loads[load].speedup, arm) for arm in self.arms if load in arm.loads]
        ratio, arm = max(((ratio, arm) for ratio, arm in measured if ratio), key=lambda pair: pair[0].value)
        ending = "drafts do not pay" if ratio.high < 1 else "drafts pay" if ratio.low > 1 else "not decided"
        return f"At load {load}: {ending}, the fastest is {arm.name} with {ratio:.2f}."

    def tables(self, path: Path) -> list[Table]:
        """A table for each contest with a row per arm and load, the fastest arm first; notes say why arms ended."""
        notes = [
            *self.advice,
            f"On {hardware_name(self.provenance.hardware)}, prompts of {self.workload} at temperature "
            f"{self.temperature:g}; load: requests in flight; TTFT: median. Times as fast as no drafts: "
            "paired by round, with a single one by request.",
            *(
                ["Responses were not compared: the weights are random."]
                if self.near_tie_nats is None
                else [
                    f"Greedy responses as those of a plain engine, or ties within {self.near_tie_nats:.3g} nats."
                ]
            ),
            *([f"Every server with VLLM_MAX_NUM_SEQS={self.sequences}."] if self.sequences else []),
            *source_notes(self, path),
        ]
        tables = [self._table(f"Speculation of {self.variant}", "drafts", self.arms, notes)]
        for title, contest in zip(("one at a time", "united"), self.flags, strict=False):
            over = [
                f"Times as fast as {contest.reference}. sessions: turns of an agent, each with all text before."
            ]
            title = f"Serving flags of {self.variant}, {title}"
            tables.append(self._table(title, "flags", contest.arms, over))
        return tables

    def _table(self, title: str, first: str, arms: Sequence[TunedArm], notes: Sequence[str]) -> Table:
        rows = [(arm, load, figures) for arm in arms for load, figures in arm.loads.items()]
        columns: dict[str, Callable[[tuple[TunedArm, str, LoadFigures]], object]] = {
            first: lambda row: row[0].name,
            "verdict": lambda row: self._verdict_of(row[0]),
            "load": lambda row: row[1],
            "tokens/s": lambda row: f"{row[2].tokens_per_second:,.1f}",
            "times as fast [95 %]": lambda row: row[2].speedup and f"{row[2].speedup:.2f}",
            "TTFT, ms": lambda row: f"{row[2].ttft_ms:,.1f}",
            "acceptance length": lambda row: row[2].acceptance_length and f"{row[2].acceptance_length:.2f}",
            "KV tokens": lambda row: row[0].kv_tokens and f"{row[0].kv_tokens:,}",
            "rounds": lambda row: row[0].rounds,
        }
        reasons = dict.fromkeys(arm.ended for arm in arms if arm.ended and not arm.loads)
        ended = [
            f"{', '.join(arm.name for arm in arms if arm.ended == reason)}: {reason.rstrip('.')}."
            for reason in reasons
        ]
        return Table.from_rows(title, rows, columns, *notes, *ended, text_columns=2)

    def _verdict_of(self, arm: TunedArm) -> str:
        found = "chosen" if arm.name == self.chosen else arm.ended or "measured"
        return f"{found}; needs the gate" if arm.needs_gate else found
