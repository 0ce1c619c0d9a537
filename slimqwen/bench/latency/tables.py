"""Tables that compare two latency records."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from slimqwen.bench.latency import speedups
from slimqwen.bench.latency.record import MEASURES, Latency, list_config_notes, name_workload
from slimqwen.bench.latency.speedups import Speedup
from slimqwen.records import store
from slimqwen.records.pairing import NotComparableError
from slimqwen.records.provenance import cpu_notes, hardware_name, source_note
from slimqwen.records.table import Table
from slimqwen.stats.estimates import CONFIDENCE_LEVEL


def comparison(first: Path, second: Path) -> Table:
    """Table of two latency records of the same requests: figures of both and their paired speed-up, by class.

    Args:
        first, second: files of the records; the speed-up is that of the second.

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
    if in_turns:
        notes[0] += f" It holds at {CONFIDENCE_LEVEL:.0%} for all timings of the pair together."
    if in_turns and (tries := speedups.count_tries(first, second)) > 1:
        notes.append(f"{_say_try(tries)} More rounds (`--rounds`) narrow it; a further timing widens it.")
    if not in_ms:
        notes.append("Medians of TTFT, TPOT and E2EL in ms; rates over all rounds.")
    if any(row.interval is None for row in rows):
        notes.append(
            "Overlapping requests are dependent, so a rate has an interval only over several rounds."
        )
    notes += [note for record in records for note in list_config_notes(record)]
    notes += [*cpu_notes(a), *map(source_note, records, (first, second))]
    title = f"Latency{name_workload(a)}: {a.variant} and {b.variant}"
    return Table.from_rows(title, rows, columns, *notes, text_columns=2)


def give_verdict(first: Path, second: Path) -> str | None:
    """One line: whether the second variant is faster over all classes, and what to do next; None without an interval.

    Args:
        first, second: files of two latency records of the same requests.
    """
    a, b = (store.read_record(path, Latency).variant for path in (first, second))
    rows = speedups.compare_latency(first, second)
    whole = next((row for row in rows if row.prompt_class == speedups.ALL_CLASSES), None)
    if whole is None or whole.speedup is None or whole.interval is None:
        return None
    low, high = whole.interval
    tries = speedups.count_tries(first, second)
    word = "faster" if low > 1 else "slower" if high < 1 else "not decided"
    return (
        f"Speed over all classes: {word}. {b} is {whole.speedup:.2f} [{low:.2f}, {high:.2f}] times as fast as {a}. "
        f"{_say_try(tries) + ' ' if tries > 1 else ''}"
        f"Next: `slimqwen gate {b}` judges quality, `slimqwen compare {b}` shows both."
    )


def _say_try(tries: int) -> str:
    return (
        f"This is timing {tries} of this pair, with the same workload, flags and checkpoints: its interval is widened "
        f"for {tries} timings, so that all of them together hold at {CONFIDENCE_LEVEL:.0%}."
    )


def comparisons(first: Path, second: Path) -> list[Table]:
    """Make tables of two variants' latencies and speed-ups, one for each workload over which both were measured.

    A workload whose records cannot be compared is named in a note of the last table.

    Args:
        first, second: folders of the variants' records, experiments/<variant>.

    Raises:
        MissingRecordError: a variant has no latency record.
        NotComparableError: no record of the first variant is comparable with one of the second.
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


def _request_count(record: Latency, prompt_class: str) -> int:
    """Number of requests of a class, or of all classes together."""
    if prompt_class == speedups.ALL_CLASSES:
        return sum(figures.request_count for figures in record.classes.values())
    return record.classes[prompt_class].request_count
