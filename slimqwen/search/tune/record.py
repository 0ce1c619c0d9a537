"""The record kind tune: every way to speculate (arm) that was tried for a variant, and whether drafts pay."""

import statistics
from collections.abc import Callable, Mapping
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
        description="Tokens per second over those of the undrafted server in the same rounds; null for that server."
    )
    acceptance_length: float | None = Field(ge=1, description="1 + accepted / drafts; null without drafts.")


class TunedArm(Block):
    """A way to speculate with its figures, and why its measurement ended."""

    name: str = Field(min_length=1)
    speculation: dict[str, Any] | None = Field(description="vLLM's speculative config; null without drafts.")
    ended: str = Field(description="Why the arm was ended early; empty if it was measured to the end.")
    rounds: Count
    speedup: Ratio | None = Field(
        description="Geometric mean over the loads, paired by round; null for fewer than two rounds or no drafts."
    )
    loads: dict[str, LoadFigures] = Field(description="Figures by the number of concurrent requests.")
    kv_tokens: Count | None = Field(description="Tokens that the KV cache holds; null if unknown.")
    near_ties: Count = Field(description="Greedy responses that differ only by a near tie.")

    @property
    def speed(self) -> float:
        """Speed-up over the undrafted server over all loads; 1 for that server, 0 if nothing was measured."""
        ratios = [each.speedup.value if each.speedup else 1.0 for each in self.loads.values()]
        return statistics.geometric_mean(ratios) if ratios else 0.0


class Tune(ServedRecord):
    """The ways to speculate for a variant on one machine, measured in turns with the undrafted server."""

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
    chosen: str | None = Field(description="Arm to serve; null if the verdict is inconclusive.")
    lines: dict[str, str] = Field(
        description="config.env lines of the chosen arm that the variant lacks, in shell quotes; an empty one unsets."
    )
    verdict: Verdict = Field(
        description="pass: drafts pay, the whole interval is above 1; fail: they do not, it is below 1."
    )

    @property
    def fastest(self) -> TunedArm | None:
        """The fastest arm with drafts; None if no arm with drafts was measured."""
        return next((arm for arm in self.arms if arm.speculation and arm.loads), None)

    @property
    def advice(self) -> list[str]:
        """Sentences: whether drafts pay, over all loads and at each load, and the config.env lines to write."""
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
        if self.verdict == Verdict.INCONCLUSIVE:
            sentences.append("The same command with more --minutes continues.")
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
        if self.chosen is not None:
            lines = " ".join(f"{key}={value}" for key, value in self.lines.items())
            sentences.append(f"Write into config.env: {lines}" if lines else "Its config.env stays as it is.")
        return sentences

    def _advise_load(self, load: str) -> str:
        """Sentence about the fastest arm at a load, and whether it is surely faster than no drafts."""
        measured = [(arm.loads[load].speedup, arm) for arm in self.arms if load in arm.loads]
        ratio, arm = max(((ratio, arm) for ratio, arm in measured if ratio), key=lambda pair: pair[0].value)
        ending = "drafts do not pay" if ratio.high < 1 else "drafts pay" if ratio.low > 1 else "not decided"
        return f"At load {load}: {ending}, the fastest is {arm.name} with {ratio:.2f}."

    def tables(self, path: Path) -> list[Table]:
        """Table with a row per arm and load, the fastest arm first; notes say why arms were ended."""
        rows = [(arm, load, figures) for arm in self.arms for load, figures in arm.loads.items()]
        columns: dict[str, Callable[[tuple[TunedArm, str, LoadFigures]], object]] = {
            "drafts": lambda row: row[0].name,
            "verdict": lambda row: self._verdict_of(row[0]),
            "load": lambda row: row[1],
            "tokens/s": lambda row: f"{row[2].tokens_per_second:,.1f}",
            "times as fast [95 %]": lambda row: row[2].speedup and f"{row[2].speedup:.2f}",
            "TTFT, ms": lambda row: f"{row[2].ttft_ms:,.1f}",
            "acceptance length": lambda row: row[2].acceptance_length and f"{row[2].acceptance_length:.2f}",
            "KV tokens": lambda row: row[0].kv_tokens and f"{row[0].kv_tokens:,}",
            "rounds": lambda row: row[0].rounds,
        }
        notes = [
            *self.advice,
            f"On {hardware_name(self.provenance.hardware)}, prompts of {self.workload} at temperature "
            f"{self.temperature:g}; load: requests in flight; TTFT: median. Times as fast as no drafts: "
            "paired by round, with a single one by request.",
            *(f"{arm.name}: {arm.ended.rstrip('.')}." for arm in self.arms if arm.ended and not arm.loads),
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
        return [Table.from_rows(f"Speculation of {self.variant}", rows, columns, *notes, text_columns=2)]

    def _verdict_of(self, arm: TunedArm) -> str:
        return "chosen" if arm.name == self.chosen else arm.ended or "measured"
