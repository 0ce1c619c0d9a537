"""The record kind latency: times and rates of one variant for each prompt class of one workload, and their table."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field

from slimqwen.bench.workload import DEFAULT_COLUMNS, Column, ServiceLevel
from slimqwen.records.provenance import hardware_name, source_notes
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

MEASURES: Mapping[str, str] = MappingProxyType(
    {
        "ttft_ms": "TTFT",
        "tpot_ms": "TPOT",
        "itl_ms": "ITL",
        "e2el_ms": "E2EL",
        "wall_ms": "time of all requests (sum)",
        "request_throughput_per_s": "requests/s",
        "output_throughput_tokens_per_s": "output tokens/s",
        "total_throughput_tokens_per_s": "all tokens/s",
        "goodput_per_s": "good requests/s",
        "good_share": "good",
        "rate_per_s": "arrivals/s",
        "concurrency": "in flight",
        "acceptance_length": "acceptance length",
        "memory_share": "of the memory's limit",
        "prefix_hits": "found in the cache",
        "repeat_speedup": "TTFT, first time / repetition [95 %]",
    }
)
"""Heading of a column, by the name of its measure or figure."""

_MOST_COLUMNS = 10
"""Number of columns that fit in a terminal of 120 characters; a table with more gets a row for each figure instead."""


class Distribution(Block):
    """Distribution of a time over the requests of a class, milliseconds.

    The standard error is over rounds if there are several, else over requests. A percentile is left out if fewer than
    one request is expected beyond it.
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
    """Number and rate of requests that met the service level of the workload."""

    ttft_ms: AboveZero = Field(description="Largest TTFT that meets the service level.")
    tpot_ms: AboveZero = Field(description="Largest TPOT that meets the service level.")
    good_count: Count
    requests_per_s: NonNegative

    @property
    def service_level(self) -> ServiceLevel:
        """Both limits as the workload's `ServiceLevel`."""
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
    prefix_tokens: Positive = Field(description="Prefix of a prompt that can be cached: whole blocks.")
    queried_tokens: Count
    hit_tokens: Count
    repeats: str | None = Field(
        description="Class whose prefixes this class sent again; null for a class that sends them first."
    )
    repeat_speedup: Ratio | None = Field(description="Median TTFT of new over repeated prefixes.")


class ClassFigures(Block):
    """Figures of one prompt class."""

    prompt_tokens: Positive = Field(description="Prompt length; the mean length if there is a spread.")
    output_tokens: Annotated[int, Field(ge=2)]
    spread: NonNegative = Field(
        0.0, description="Standard deviation of the natural logarithm of both lengths."
    )
    named_prompt_tokens: Positive = Field(description="Prompt length in the workload's file, before scaling.")
    named_output_tokens: Annotated[int, Field(ge=2)]
    concurrency: Positive | None = Field(description="Most requests in flight; null without a limit.")
    arrival: Arrival | None = Field(
        default=None, description="null if requests are sent as soon as the concurrency allows."
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
    goodput: Goodput | None = Field(default=None, description="null if the workload has no service level.")
    ttft_ms: Distribution = Field(description="Time to first token.")
    tpot_ms: Distribution = Field(description="Time per output token after the first, mean of a request.")
    memory_limit_ms: AboveZero | None = Field(
        default=None,
        description="TPOT at which a decode step is as short as memory bandwidth allows; null if unknown.",
    )
    itl_ms: Distribution = Field(
        description="Time between two streamed chunks; with speculation a chunk can hold several tokens."
    )
    e2el_ms: Distribution = Field(description="Time from sending a request to its last token.")
    acceptance: ServedAcceptance | None = Field(description="null if nothing was drafted.")
    prefix_cache: PrefixCache | None = Field(default=None, description="null if no prefixes are repeated.")
    prompts_sha256: Sha256


class Latency(ServedRecord):
    """Latency and throughput of one variant over the classes of one workload."""

    kind = "latency"
    verb = "bench latency"

    workload: str = Field(min_length=1)
    max_model_len: Positive = Field(
        description="Longest prompt and output together that the server accepts, tokens."
    )
    scale: float = Field(gt=0, le=1, description="Factor applied to the lengths in the workload's file.")
    rounds: Positive
    rounds_of_earlier_run: Count = Field(default=0, description="Rounds from an interrupted run.")
    rounds_repeated: Count = Field(default=0, description="Rounds repeated because of a busy host.")
    run: str = Field(min_length=1, description="Id that records of variants measured in turns share.")
    interleaved_with: tuple[VariantName, ...]
    memory_bandwidth_gb_per_s: AboveZero | None = Field(
        default=None, description="Of the GPU's data sheet, or of copies on this CPU; null if unknown."
    )
    config: dict[str, str] = Field(
        default={},
        description="config.env lines of the workload that replace the variant's own; an empty value unsets.",
    )
    columns: tuple[Column, ...] = Field(default=(), description="Columns of its table; empty in old records.")
    classes: dict[str, ClassFigures] = Field(min_length=1)

    @property
    def topic(self) -> str:
        """Name of the workload: a newer record replaces only one of the same workload."""
        return self.workload

    @property
    def basis(self) -> dict[str, Any]:
        """Properties that two records must share to be compared: workload, lengths, arrivals, hardware, data files."""
        classes = self.classes.items()
        return {
            "workload": self.workload,
            "lengths": {
                name: (one.prompt_tokens, one.output_tokens, one.concurrency) for name, one in classes
            },
            "arrivals": {name: one.arrival for name, one in classes},
            "hardware": self.provenance.hardware.basis,
            **super().basis,
        }

    def tables(self, path: Path) -> list[Table]:
        """Table of the figures of each prompt class."""
        return [_class_table(self, path)]


def _class_table(record: Latency, path: Path) -> Table:
    """Table of each prompt class of a record, with the figures that its workload chooses."""
    classes = record.classes.values()
    limited = any(figures.memory_limit_ms for figures in classes)
    chosen = [each for each in record.columns or DEFAULT_COLUMNS if limited or each != "memory_share"]
    columns: dict[str, Callable[[tuple[str, ClassFigures]], object]] = {
        "class, tokens": lambda row: f"{row[0]} {row[1].prompt_tokens} -> {row[1].output_tokens}",
        **{heading(column): partial(_cell, column) for column in chosen},
        "requests": lambda row: f"{row[1].request_count} ({row[1].failure_count} failed)",
    }
    means = "Means ± standard errors, on" if any(column.endswith(".mean") for column in chosen) else "On"
    notes = [f"{means} {hardware_name(record.provenance.hardware)}."]
    if level := next((figures.goodput for figures in classes if figures.goodput), None):
        notes.append(f"Good requests: TTFT up to {level.ttft_ms:g} ms and TPOT up to {level.tpot_ms:g} ms.")
    if limited and "memory_share" in chosen:
        notes.append(
            f"Of the memory's limit: TPOT if nothing but reading at {record.memory_bandwidth_gb_per_s:,.0f} GB/s took "
            "time, over the measured one."
        )
    if any(figures.spread for figures in classes):
        notes.append("In classes with a spread, lengths are means of a log-normal distribution.")
    if caches := [figures.prefix_cache for figures in classes if figures.prefix_cache]:
        lengths = ", ".join(dict.fromkeys(str(cache.prefix_tokens) for cache in caches))
        notes.append(
            f"Prefixes of {lengths} tokens, whole blocks of {caches[0].block_tokens}; found in the cache: share of all "
            "prompt tokens, by the server's counters."
        )
    notes += [*list_config_notes(record), *source_notes(record, path)]
    title = f"Latency of {record.variant}{name_workload(record)}"
    table = Table.from_rows(title, record.classes.items(), columns, *notes)
    if any("-" in row for row in table.rows):
        missing = "-: too few requests for this figure, or it does not apply."
        table = replace(table, notes=(*table.notes, missing))
    if len(columns) > _MOST_COLUMNS:
        headings, *rows = zip(table.columns, *table.rows, strict=True)
        table = replace(table, columns=headings, rows=tuple(rows))
    return table


def heading(column: str) -> str:
    """Heading of a table column; `column` is a figure, or `<measure>.<statistic>` such as ttft_ms.median."""
    measure, _, statistic = column.partition(".")
    if not statistic:
        return MEASURES[column]
    return f"{MEASURES[measure]}{'' if statistic == 'mean' else f' {statistic}'}, ms"


def _cell(column: str, row: tuple[str, ClassFigures]) -> object:
    """One formatted figure of a class; None if the class does not have it."""
    figures = row[1]
    measure, _, statistic = column.partition(".")
    if statistic:
        times = getattr(figures, measure)
        value = getattr(times, statistic)
        error = f" ± {times.standard_error:,.1f}" if statistic == "mean" else ""
        return None if value is None else f"{value:,.1f}{error}"
    goodput, cache = figures.goodput, figures.prefix_cache
    ratio = cache and cache.repeat_speedup
    total = figures.total_throughput_tokens_per_s
    cells = {
        "request_throughput_per_s": f"{figures.request_throughput_per_s:,.2f}",
        "output_throughput_tokens_per_s": f"{figures.output_throughput_tokens_per_s:,.0f}",
        "total_throughput_tokens_per_s": None if total is None else f"{total:,.0f}",
        "goodput_per_s": goodput and f"{goodput.requests_per_s:,.2f}",
        "good_share": goodput and f"{goodput.good_count / figures.request_count:.0%}",
        "rate_per_s": figures.arrival and f"{figures.arrival.rate_per_s:,.2f}",
        "concurrency": str(figures.concurrency or "no limit"),
        "acceptance_length": figures.acceptance and f"{figures.acceptance.length:.2f}",
        "memory_share": figures.memory_limit_ms and f"{figures.memory_limit_ms / figures.tpot_ms.mean:.1%}",
        "prefix_hits": cache and f"{cache.hit_tokens / cache.queried_tokens:.0%}",
        "repeat_speedup": ratio and f"{ratio.value:.1f}x [{ratio.low:.1f}, {ratio.high:.1f}]",
    }
    return cells[column]


def name_workload(record: Latency) -> str:
    """End of a table's title that names the workload, such as ", poisson"; empty for the default workload `classes`."""
    return "" if record.workload == "classes" else f", {record.workload}"


def list_config_notes(record: Latency) -> list[str]:
    """A note with the config.env lines of the workload that replaced the variant's own; an empty list without any."""
    lines = ", ".join(f"{key}={value}" for key, value in record.config.items())
    return [f"{record.variant} served with {lines}."] if lines else []
