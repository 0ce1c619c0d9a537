"""The record kind latency: figures of one variant for each prompt class of one workload."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from slimqwen.bench.workload import Column, ServiceLevel
from slimqwen.records.record import (
    Block,
    Count,
    NonNegative,
    Positive,
    Ratio,
    ServedRecord,
    Sha256,
    Share,
    Table,
    VariantName,
)

AboveZero = Annotated[float, Field(gt=0)]


class Distribution(Block):
    """A time in milliseconds over the requests of a class.

    The standard error is over rounds where there are several, else over requests. A percentile is left out where fewer
    than one request is expected beyond it.
    """

    mean: NonNegative
    standard_error: NonNegative
    median: NonNegative
    p90: NonNegative | None = None
    p95: NonNegative | None = None
    p99: NonNegative | None = None


class Arrival(Block):
    """Arrival process of requests."""

    process: Literal["Poisson", "fixed gap"]
    rate_per_s: AboveZero


class Goodput(Block):
    """Requests that met the service level of the workload."""

    ttft_ms: AboveZero = Field(description="Largest good TTFT.")
    tpot_ms: AboveZero = Field(description="Largest good TPOT.")
    good_count: Count
    requests_per_s: NonNegative

    @property
    def service_level(self) -> ServiceLevel:
        """The two limits."""
        return ServiceLevel(ttft_ms=self.ttft_ms, tpot_ms=self.tpot_ms)


class ServedAcceptance(Block):
    """Drafts and accepted tokens of one prompt class, by the server's counters."""

    length: float = Field(ge=1, description="Acceptance length: 1 + accepted tokens / drafts.")
    drafts: Count
    draft_tokens: Count
    accepted_tokens: Count
    per_position_rates: tuple[Share, ...]


class PrefixCache(Block):
    """Prefix caching over a class, by the server's counters."""

    block_tokens: Positive = Field(description="The server's effective attention block.")
    prefix_tokens: Positive = Field(description="Prefix of a prompt: whole blocks.")
    queried_tokens: Count
    hit_tokens: Count
    repeats: str | None = Field(
        description="The class whose prefixes were sent again; null for the first time."
    )
    repeat_speedup: Ratio | None = Field(
        description="Median TTFT of the first time over that of the repetition."
    )


class ClassFigures(Block):
    """Figures of one prompt class."""

    prompt_tokens: Positive = Field(description="The mean where there is a spread.")
    output_tokens: Annotated[int, Field(ge=2)]
    spread: NonNegative = Field(
        0.0, description="Standard deviation of the natural logarithm of both lengths."
    )
    named_prompt_tokens: Positive = Field(description="As in the workload's file, before scaling.")
    named_output_tokens: Annotated[int, Field(ge=2)]
    concurrency: Positive | None = Field(description="Most requests in flight; null without a limit.")
    arrival: Arrival | None = Field(
        default=None, description="null: requests are sent as soon as the concurrency allows."
    )
    durations_s: tuple[NonNegative, ...] | None = Field(
        default=None, min_length=1, description="Duration of each round; null in old records."
    )
    request_count: Positive
    failure_count: Count
    duration_s: NonNegative
    request_throughput_per_s: NonNegative
    output_throughput_tokens_per_s: NonNegative
    total_throughput_tokens_per_s: NonNegative | None = Field(
        default=None, description="Tokens of prompts and outputs; null in old records."
    )
    goodput: Goodput | None = Field(default=None, description="null without a service level.")
    ttft_ms: Distribution = Field(description="Time to first token.")
    tpot_ms: Distribution = Field(description="Time per output token after the first, mean of a request.")
    itl_ms: Distribution = Field(
        description="Time between two streamed chunks; with speculation a chunk can hold several tokens."
    )
    e2el_ms: Distribution = Field(description="Time from sending a request to its last token.")
    acceptance: ServedAcceptance | None = Field(description="null without speculative decoding.")
    prefix_cache: PrefixCache | None = Field(default=None, description="null where no prefixes are repeated.")
    prompts_sha256: Sha256


class Latency(ServedRecord):
    """Latency and throughput of one variant over the classes of one workload."""

    kind = "latency"
    verb = "bench latency"

    workload: str = Field(min_length=1)
    max_model_len: Positive = Field(
        description="Longest prompt and output together that the server accepts, tokens."
    )
    scale: float = Field(gt=0, le=1, description="Factor on the lengths in the workload's file.")
    rounds: Positive
    rounds_of_earlier_run: Count = Field(default=0, description="Rounds taken over from an interrupted run.")
    rounds_repeated: Count = Field(
        default=0, description="Rounds measured again because the host was too busy."
    )
    run: str = Field(
        min_length=1, description="Shared by the records of variants that were measured in turns."
    )
    interleaved_with: tuple[VariantName, ...]
    config: dict[str, str] = Field(
        default={},
        description="config.env lines of the workload laid over the variant's own; an empty one unsets.",
    )
    columns: tuple[Column, ...] = Field(default=(), description="Figures of its table; empty in old records.")
    classes: dict[str, ClassFigures] = Field(min_length=1)

    @property
    def topic(self) -> str:
        """Its workload."""
        return self.workload

    def tables(self, path: Path) -> list[Table]:
        """Figures of each prompt class."""
        from slimqwen.bench.latency.tables import class_table

        return [class_table(self, path)]
