"""Tables of latency records: the classes of one record, and two records against each other."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from slimqwen.bench.latency import speedups
from slimqwen.bench.latency.record import ClassFigures, Latency
from slimqwen.bench.latency.speedups import Speedup
from slimqwen.bench.workload import DEFAULT_COLUMNS
from slimqwen.records import store
from slimqwen.records.pairing import NotComparableError
from slimqwen.records.provenance import cpu_notes, hardware_name, source_note, source_notes
from slimqwen.records.table import Table

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
        "prefix_hits": "found in the cache",
        "repeat_speedup": "TTFT, first time / repetition [95 %]",
    }
)
"""Column heading by the name of a measure or figure."""

_MOST_COLUMNS = 10
"""Columns that fit a terminal of 120 characters; a table with more has a row for each figure."""


def class_table(record: Latency, path: Path) -> Table:
    """Figures of each prompt class of a record, as its workload chooses them."""
    chosen = record.columns or DEFAULT_COLUMNS
    columns: dict[str, Callable[[tuple[str, ClassFigures]], object]] = {
        "class, tokens": lambda row: f"{row[0]} {row[1].prompt_tokens} -> {row[1].output_tokens}",
        **{heading(column): partial(_cell, column) for column in chosen},
        "requests": lambda row: f"{row[1].request_count} ({row[1].failure_count} failed)",
    }
    means = "Means ± standard errors, on" if any(column.endswith(".mean") for column in chosen) else "On"
    notes = [f"{means} {hardware_name(record.provenance.hardware)}."]
    classes = record.classes.values()
    if level := next((figures.goodput for figures in classes if figures.goodput), None):
        notes.append(f"Good: TTFT of {level.ttft_ms:g} ms and TPOT of {level.tpot_ms:g} ms at most.")
    if any(figures.spread for figures in classes):
        notes.append("Lengths are means of log-normal ones in classes with a spread.")
    if caches := [figures.prefix_cache for figures in classes if figures.prefix_cache]:
        lengths = ", ".join(dict.fromkeys(str(cache.prefix_tokens) for cache in caches))
        notes.append(
            f"Prefixes of {lengths} tokens, whole blocks of {caches[0].block_tokens}; found in the cache: share of all "
            "prompt tokens, by the server's counters."
        )
    notes += [*_config_note(record), *source_notes(record, path)]
    title = f"Latency of {record.variant}{_workload(record)}"
    table = Table.from_rows(title, record.classes.items(), columns, *notes)
    if any("-" in row for row in table.rows):
        missing = "-: too few requests for this figure, or it does not apply."
        table = replace(table, notes=(*table.notes, missing))
    if len(columns) > _MOST_COLUMNS:
        headings, *rows = zip(table.columns, *table.rows, strict=True)
        table = replace(table, columns=headings, rows=tuple(rows))
    return table


def comparison(first: Path, second: Path) -> Table:
    """Two latency records of the same requests: figures of both and their paired speed-up, by class.

    Raises:
        NotComparableError: requests or hardware differ.
        RecordError: a record cannot be read.
    """
    a, b = records = store.read_record(first, Latency), store.read_record(second, Latency)
    rows = speedups.compare_latency(first, second)
    in_ms = all(row.measure.endswith("_ms") for row in rows)
    unit = " median, ms" if in_ms else ""
    in_turns = a.run == b.run
    columns: dict[str, Callable[[Speedup], object]] = {
        "class, tokens": lambda row: " ".join(
            [
                row.prompt_class,
                *([f"{row.prompt_tokens} -> {row.output_tokens}"] if row.prompt_tokens else []),
            ]
        ),
        "measure": lambda row: MEASURES[row.measure],
        f"{a.variant}{unit}": lambda row: f"{row.first:,.1f}",
        f"{b.variant}{unit}": lambda row: f"{row.second:,.1f}",
        f"speed-up of {b.variant}{', paired' if in_turns else ''}": lambda row: (
            None if row.speedup is None else f"{row.speedup:.2f}x"
        ),
        "95 % interval": lambda row: row.interval and f"{row.interval[0]:.2f} to {row.interval[1]:.2f}",
        "requests": lambda row: min(_request_count(record, row.prompt_class) for record in records),
    }
    order = "in turns" if in_turns else "one after the other, not in turns"
    notes = [
        f"On {hardware_name(a.provenance.hardware)}, {order}. {_speed_up_note(rows, a.variant, b.variant)}"
    ]
    if not in_ms:
        notes.append("Medians of TTFT, TPOT and E2EL in ms; rates over all rounds.")
    if any(row.interval is None for row in rows):
        notes.append(
            "Requests that overlap depend on each other: a rate has an interval only where several rounds have some."
        )
    notes += [note for record in records for note in _config_note(record)]
    notes += [*cpu_notes(a), *map(source_note, records, (first, second))]
    title = f"Latency{_workload(a)}: {a.variant} and {b.variant}"
    return Table.from_rows(title, rows, columns, *notes, text_columns=2)


def comparisons(first: Path, second: Path) -> list[Table]:
    """A comparison for each workload that both variants were measured over.

    Raises:
        MissingRecordError: a variant has no latency record.
        NotComparableError: no record of the one fits any of the other.
    """
    tables: list[Table] = []
    misfits: list[NotComparableError] = []
    for workload in speedups.shared_workloads(first, second):
        try:
            tables.append(comparison(*speedups.latency_pair(first, second, workload)))
        except NotComparableError as error:
            misfits.append(error)
    if not tables:
        raise misfits[0]
    if misfits:
        notes = (*tables[-1].notes, *(f"Not shown: {error}." for error in misfits))
        tables[-1] = replace(tables[-1], notes=notes)
    return tables


def _speed_up_note(rows: Sequence[Speedup], first: str, second: str) -> str:
    counts = sorted({row.rounds for row in rows if row.interval})
    if not any(counts):
        return (
            f"Speed-up: {first} / {second}, with an interval by bootstrap over requests, which does not show what a "
            "restart changes."
        )
    over = " and ".join(f"{count} rounds" if count else "requests" for count in counts)
    return (
        f"Speed-up: {first} / {second} in each round, geometric mean over {over} with an interval by Student's t. The "
        "medians are of all requests of all rounds, so their quotient can differ from it."
    )


def heading(column: str) -> str:
    """Heading of a column that a workload may ask for."""
    measure, _, statistic = column.partition(".")
    if not statistic:
        return MEASURES[column]
    return f"{MEASURES[measure]}{'' if statistic == 'mean' else f' {statistic}'}, ms"


def _cell(column: str, row: tuple[str, ClassFigures]) -> object:
    """One formatted figure of a class; None where it has none."""
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
        "prefix_hits": cache and f"{cache.hit_tokens / cache.queried_tokens:.0%}",
        "repeat_speedup": ratio and f"{ratio.value:.1f}x [{ratio.low:.1f}, {ratio.high:.1f}]",
    }
    return cells[column]


def _workload(record: Latency) -> str:
    return "" if record.workload == "classes" else f", {record.workload}"


def _config_note(record: Latency) -> list[str]:
    lines = ", ".join(f"{key}={value}" for key, value in record.config.items())
    return [f"{record.variant} served with {lines}."] if lines else []


def _request_count(record: Latency, prompt_class: str) -> int:
    """Requests of a class, or of all classes together."""
    if prompt_class == speedups.ALL_CLASSES:
        return sum(figures.request_count for figures in record.classes.values())
    return record.classes[prompt_class].request_count
