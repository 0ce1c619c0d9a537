"""Table of what other load generators measured, beside the latency records of two variants."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from slimqwen.bench.external_results import ExternalRun, at_a_time, read_external
from slimqwen.bench.latency.record import ClassFigures, Latency
from slimqwen.records import store
from slimqwen.records.provenance import cpu_notes, hardware_name, shared_source_notes
from slimqwen.records.table import Table

_ALIKE = 2.0
"""Lengths of prompts and responses count as alike up to this ratio."""


class _Row(NamedTuple):
    measured: str
    load: str
    prompt_tokens: float
    output_tokens: float
    ttft_ms: float | None
    tpot_ms: float | None
    e2el_ms: float | None
    tokens_per_s: float | None
    requests: str


def external_table(first: Path, second: Path, file: Path) -> Table:
    """Table of the runs in a file of another tool, and of the classes of two variants with lengths like theirs.

    Without such a class it has all classes of the newest records. Only medians stand side by side: there is no ratio,
    for the requests are not the same, and no interval.

    Args:
        first, second: the variants' folders of records.
        file: result file of GuideLLM, AIPerf or `vllm bench serve`.

    Raises:
        BenchError: the file cannot be read, is of no such tool, lacks a figure, or is of a run that did not end.
        MissingRecordError: a variant has no latency record.
    """
    runs = read_external(file)
    newest = [(record, path) for folder in (first, second) for record, path in _newest_by_workload(folder)]
    classes = [
        (record, path, name, figures) for record, path in newest for name, figures in record.classes.items()
    ]
    alike = [each for each in classes if any(_is_alike(run, each[3]) for run in runs)]
    shown = alike or classes
    rows = [_of_run(run) for run in runs]
    rows += [_of_class(record, name, figures) for record, _, name, figures in shown]
    columns: dict[str, Callable[[_Row], object]] = {
        "measured": lambda row: row.measured,
        "load": lambda row: row.load,
        "tokens": lambda row: f"{row.prompt_tokens:,.0f} -> {row.output_tokens:,.0f}",
        "TTFT, ms": lambda row: _figure(row.ttft_ms),
        "TPOT, ms": lambda row: _figure(row.tpot_ms),
        "E2EL, ms": lambda row: _figure(row.e2el_ms),
        "output tokens/s": lambda row: _figure(row.tokens_per_s),
        "requests": lambda row: row.requests,
    }
    used = {path: record for record, path, _, _ in shown}
    notes = [
        "Medians over requests; the file does not say which variant answered, nor on which machine. No ratio and no "
        f"interval: only `slimqwen bench latency {second.name} --against {first.name}` times both in turns.",
        *(f"Not comparable, {tool}: {limits}." for tool, limits in _list_limits(runs)),
        *([] if alike else ["No class of these variants has lengths within a factor of two of the file's."]),
        f"Records: on {', '.join(dict.fromkeys(hardware_name(each.provenance.hardware) for each in used.values()))}.",
        *cpu_notes(*used.values()),
        *shared_source_notes(list(used.values()), list(used)),
    ]
    title = f"{first.name} and {second.name} beside {file.name}"
    return Table.from_rows(title, rows, columns, *notes, text_columns=3)


def _newest_by_workload(folder: Path) -> Iterator[tuple[Latency, Path]]:
    """The newest latency record of each workload, measured on a quiet host."""
    store.latest(folder, Latency)  # raises an error that names the command
    seen: set[str] = set()
    for path in store.records(folder, Latency):
        record = store.read_record(path, Latency)
        if record.workload not in seen and not record.provenance.host_was_busy:
            seen.add(record.workload)
            yield record, path


def _is_alike(run: ExternalRun, figures: ClassFigures) -> bool:
    pairs = (run.prompt_tokens, figures.prompt_tokens), (run.output_tokens, figures.output_tokens)
    return all(max(pair) <= _ALIKE * min(pair) for pair in pairs)


def _of_run(run: ExternalRun) -> _Row:
    requests = f"{run.requests} ({run.failures} failed)"
    times = run.ttft_ms, run.tpot_ms, run.e2el_ms, run.output_tokens_per_s
    named = f"{run.tool}, model {run.model}" if run.model else run.tool
    return _Row(named, run.load, run.prompt_tokens, run.output_tokens, *times, requests)


def _of_class(record: Latency, name: str, figures: ClassFigures) -> _Row:
    if arrival := figures.arrival:
        load = f"{arrival.rate_per_s:.3g}/s, {arrival.process}"
    else:
        load = at_a_time(figures.concurrency)
    return _Row(
        f"{record.variant}, class {name} of {record.workload}",
        load,
        figures.prompt_tokens,
        figures.output_tokens,
        figures.ttft_ms.median,
        figures.tpot_ms.median,
        figures.e2el_ms.median,
        figures.output_throughput_tokens_per_s,
        f"{figures.request_count} ({figures.failure_count} failed)",
    )


def _list_limits(runs: Sequence[ExternalRun]) -> Iterator[tuple[str, str]]:
    """Each tool with what cannot be compared in its runs, once."""
    found = dict.fromkeys((run.tool, "; ".join(run.limits)) for run in runs)
    yield from found


def _figure(value: float | None) -> str | None:
    return None if value is None else f"{value:,.1f}"
