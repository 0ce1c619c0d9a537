"""Cost at a service level: tokens a second within limits of TTFT and TPOT, and what they cost by the user's prices."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, field_validator

from slimqwen.bench.latency import Latency
from slimqwen.bench.latency.service_level import GoodThroughput, best, good_throughput
from slimqwen.records import settings
from slimqwen.records.collection import Collection, StoredRecord
from slimqwen.records.table import Table
from slimqwen.report.leaderboard import DAMAGED, hardware

FILE = "eval/prices.yaml"


class Prices(BaseModel):
    """eval/prices.yaml: the user's price of an hour of a machine.

    Attributes:
        per_hour: price by `provenance.hardware_name`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    currency: str = Field(default="USD", min_length=1)
    per_hour: dict[str, PositiveFloat] = {}

    @field_validator("per_hour", mode="before")
    @classmethod
    def _none_is_empty(cls, prices: Any) -> Any:
        return {} if prices is None else prices


@dataclass(frozen=True)
class Throughput:
    """The throughput of a variant on one hardware within a service level, under one load."""

    entry: StoredRecord[Latency]
    load: GoodThroughput

    @property
    def hardware(self) -> str:
        """Hardware that it was measured on."""
        return hardware(self.entry)


def read_prices(root: Path, file: Path | None = None) -> Prices:
    """Read the user's prices.

    Args:
        file: file of prices; None for eval/prices.yaml, which may be missing.

    Raises:
        SettingsError: the named file is missing, or a file cannot be used.
    """
    if file is None and not (root / FILE).exists():
        return Prices()
    path = (file or root / FILE).absolute()
    base = root if path.is_relative_to(root) else path.parent
    missing = f"does not exist; write it in the form of {FILE}"
    return settings.read(path, base, Prices.model_validate, missing=missing)


def throughputs(records: Collection, variant: str | None = None) -> list[Throughput]:
    """The newest throughput within a service level by variant, hardware and workload, under each load.

    Args:
        variant: None for all, each under the load that yields most.
    """
    newest: dict[tuple[str, str, str], StoredRecord[Latency]] = {}
    for entry in sorted(records.select(Latency, variant), key=lambda entry: entry.ended, reverse=True):
        if any(figures.goodput for figures in entry.record.classes.values()):
            newest.setdefault((entry.variant, hardware(entry), entry.record.workload), entry)
    rows = []
    for entry in newest.values():
        with contextlib.suppress(*DAMAGED):  # the problems name damaged items
            loads = good_throughput(entry.record, entry.path)
            if variant is None:
                loads = list(filter(None, [best(loads)]))
            rows += [Throughput(entry, load) for load in loads]
    return rows


def table(rows: Sequence[Throughput], prices: Prices) -> Table | None:
    """Tokens a second within the service level, and per unit of money where the hardware has a price; None if empty."""
    if not rows:
        return None
    currency = prices.currency

    def price(row: Throughput) -> float | None:
        return prices.per_hour.get(row.hardware)

    columns: dict[str, Callable[[Throughput], object]] = {
        "variant": lambda row: row.entry.variant,
        "hardware": lambda row: row.hardware,
        "TTFT, TPOT at most": lambda row: f"{row.load.level.ttft_ms:g} ms, {row.load.level.tpot_ms:g} ms",
        "load": lambda row: f"{row.entry.record.workload}, {row.load.prompt_class}",
        "arrivals/s": lambda row: row.load.rate_per_s and f"{row.load.rate_per_s:,.2f}",
        "good": lambda row: f"{row.load.good_share:.0%}",
        "good tokens/s": lambda row: _with_interval(row.load, 1.0),
    }
    if any(price(row) for row in rows):
        columns[f"good tokens/s per {currency} an hour"] = lambda row: (
            _with_interval(row.load, 1 / cost) if (cost := price(row)) else None
        )
        columns[f"{currency} per million good tokens"] = lambda row: (
            f"{1e6 * cost / 3600 / row.load.tokens_per_s:,.2f}"
            if (cost := price(row)) and row.load.tokens_per_s
            else None
        )
    return Table.from_rows("Cost at a service level", rows, columns, *_notes(rows, prices), text_columns=4)


def _with_interval(load: GoodThroughput, factor: float) -> str:
    value = f"{factor * load.tokens_per_s:,.4g}"
    if load.interval is None:
        return value
    return f"{value} [{', '.join(f'{factor * end:,.4g}' for end in load.interval)}]"


def _notes(rows: Sequence[Throughput], prices: Prices) -> Iterator[str]:
    yield (
        "Good: within both limits, TPOT as the mean of a request. Tokens are output tokens of good requests; brackets "
        "hold the 95 % interval over rounds."
    )
    unpriced = sorted({row.hardware for row in rows} - prices.per_hour.keys())
    if unpriced:
        yield (
            f"No price of {' or of '.join(unpriced)}: write what an hour costs you into {FILE}, or give "
            "`slimqwen report` a file with --prices."
        )
