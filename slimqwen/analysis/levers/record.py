"""The record kind levers: step times of variants on this CPU, measured in turns and predicted beforehand."""

from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING

from pydantic import Field, PositiveFloat

from slimqwen.analysis.roofline.gpu import Precision
from slimqwen.records.provenance import source_notes
from slimqwen.records.record import Block, Count, NonNegative, Positive, Ratio, Record, VariantName
from slimqwen.records.table import Table

if TYPE_CHECKING:
    from slimqwen.records.collection import Collection

NOTED_ERROR = 0.2
"""Relative error of a predicted ratio above which the table names the variant."""


class Cpu(Block):
    """What this CPU was measured to do, with as many threads as the engine has."""

    name: str = Field(min_length=1)
    memory_bandwidth_gb_per_s: PositiveFloat = Field(
        description="the fastest of a copy, read and written, and of weights read by a bf16 product of one token"
    )
    copy_gb_per_s: PositiveFloat = Field(description="of a copy into new memory, read and written")
    bf16_peak_tflops: PositiveFloat = Field(description="of a square product of vLLM's own")
    weight_gb_per_s: dict[str, PositiveFloat] = Field(
        description="weights read by vLLM's product, by stored width and tokens of the pass: bf16_5"
    )
    host_ms: dict[str, PositiveFloat] = Field(
        description="step time of a model with the same layers, too narrow for its matrices to take time, by K"
    )

    @property
    def bandwidth(self) -> float:
        """Memory bandwidth, bytes per second."""
        return self.memory_bandwidth_gb_per_s * 1e9

    def peak(self, precision: Precision) -> float:
        """Peak FLOP/s of every precision: that of bf16, the only one measured."""
        return self.bf16_peak_tflops * 1e12


class Arm(Block):
    """One variant. Lists have an entry a round."""

    variant: VariantName
    checkpoint: str = Field(min_length=16, description="checkpoint digest")
    random_weights: bool
    num_speculative_tokens: Count
    acceptance_length: float = Field(ge=1, description="set by the variant, else measured")
    acceptance_is_set: bool
    bytes_per_step: NonNegative = Field(description="read and written by all passes, one sequence")
    roofline_ms: PositiveFloat = Field(description="bound of a step: bytes / bandwidth or FLOPs / peak")
    predicted_parts_ms: dict[str, NonNegative] = Field(description="terms of a step, milliseconds")
    step_ms: tuple[PositiveFloat, ...] = Field(min_length=1, description="mean step of the timed request")
    counted_acceptance_length: tuple[PositiveFloat, ...] = Field(description="tokens / steps")
    resident_bytes: tuple[Count, ...] = Field(description="anonymous memory of the engine's process")
    step_ratio: Ratio = Field(description="step time over the first variant's, paired by round")
    predicted_step_ratio: PositiveFloat = Field(description="predicted step time over the first variant's")
    roofline_step_ratio: PositiveFloat = Field(description="bound of a step over the first variant's")
    prediction_error: float = Field(description="predicted step ratio / measured one - 1")
    speed_up: Ratio = Field(description="tokens per second over the first variant's, paired by round")

    @property
    def predicted_ms(self) -> float:
        """Predicted step time."""
        return sum(self.predicted_parts_ms.values())

    @property
    def tokens_per_second(self) -> float:
        """Median over the rounds."""
        return 1e3 * self.acceptance_length / median(self.step_ms)


class Levers(Record):
    """Step times on this CPU, measured in turns and predicted beforehand; about speed and memory only."""

    kind = "levers"
    verb = "analyze levers"

    cpu: Cpu
    prompt_tokens: Positive
    output_tokens: Positive
    rounds: Positive
    repeated_turns: Count = Field(description="turns taken again because other work ran on the machine")
    arms: tuple[Arm, ...] = Field(
        min_length=2, description="the first is the one that ratios are relative to"
    )

    @property
    def worst(self) -> Arm:
        """The variant whose step ratio was predicted worst."""
        return max(self.arms, key=lambda arm: abs(arm.prediction_error))

    def finding(self, path: Path, records: "Collection") -> str:
        """The largest speed-up and the largest error."""
        best = max(self.arms, key=lambda arm: arm.speed_up.value)
        return (
            f"{best.variant} decodes {best.speed_up:.2f} times as fast as {self.arms[0].variant}; step ratios "
            f"predicted within {abs(self.worst.prediction_error):.0%} ({self.worst.variant})"
        )

    def tables(self, path: Path) -> list[Table]:
        """Predicted beside measured ratios; what a step is made of."""
        first = self.arms[0].variant
        columns: dict[str, Callable[[Arm], object]] = {
            "variant": lambda arm: arm.variant,
            "K": lambda arm: arm.num_speculative_tokens,
            "acceptance length": lambda arm: f"{arm.acceptance_length:.2f}",
            "GB/step": lambda arm: f"{arm.bytes_per_step / 1e9:.2f}",
            "step, ms": lambda arm: f"{median(arm.step_ms):.1f}",
            "predicted, ms": lambda arm: f"{arm.predicted_ms:.1f}",
            "step ratio [95 %]": lambda arm: f"{arm.step_ratio:.2f}",
            "predicted": lambda arm: f"{arm.predicted_step_ratio:.2f}",
            "error": lambda arm: f"{arm.prediction_error:+.0%}",
            "roofline": lambda arm: f"{arm.roofline_step_ratio:.2f}",
            "tokens/s": lambda arm: f"{arm.tokens_per_second:.1f}",
            "speed-up [95 %]": lambda arm: f"{arm.speed_up:.2f}",
            "memory, GB": lambda arm: f"{median(arm.resident_bytes) / 1e9:.2f}",
        }
        worst = self.worst
        beyond = [arm.variant for arm in self.arms if abs(arm.prediction_error) > NOTED_ERROR]
        random = all(arm.random_weights for arm in self.arms)
        steps = Table.from_rows(
            f"Levers on decode speed, {self.cpu.name}" + (" (random weights)" if random else ""),
            self.arms,
            columns,
            *(
                ["Random weights: for speed and memory only; the acceptance length is set, not found."]
                if random
                else []
            ),
            f"One sequence, {self.prompt_tokens} -> {self.output_tokens} tokens, {self.rounds} rounds in turns, a "
            f"fresh engine each. Ratios are to {first}, paired by round, geometric means with Student's t intervals; "
            "tokens per second are acceptance length / step time.",
            f"Largest error of a predicted step ratio: {worst.variant}, {worst.prediction_error:+.0%}; beyond "
            f"{NOTED_ERROR:.0%}: {', '.join(beyond) or 'none'}.",
            f"Measured beforehand: {self._cpu_note()}.",
            *source_notes(self, path),
        )
        parts: dict[str, Callable[[Arm], object]] = {"variant": lambda arm: arm.variant}
        for part in self.arms[0].predicted_parts_ms:
            parts[f"{part}, ms"] = lambda arm, part=part: f"{arm.predicted_parts_ms[part]:.1f}"  # type: ignore[misc]
        parts["sum, ms"] = lambda arm: f"{arm.predicted_ms:.1f}"
        parts["measured, ms"] = lambda arm: f"{mean(arm.step_ms):.1f}"
        return [steps, Table.from_rows("A decode step, term by term, as predicted", self.arms, parts)]

    def _cpu_note(self) -> str:
        rates = ", ".join(f"{name} {rate:.1f}" for name, rate in self.cpu.weight_gb_per_s.items())
        host = ", ".join(f"{value:.1f} ms at K={depth}" for depth, value in self.cpu.host_ms.items())
        return (
            f"copy into new memory {self.cpu.copy_gb_per_s:.1f} GB/s, weights by width and tokens of "
            f"a pass {rates} GB/s, bf16 peak {self.cpu.bf16_peak_tflops:.2f} TFLOP/s, host {host}"
        )
