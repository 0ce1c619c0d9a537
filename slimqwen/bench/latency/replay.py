"""Replay of a latency record: the same requests again, and whether the times are the same."""

from pathlib import Path

from slimqwen.bench import BenchError, latency
from slimqwen.bench.latency.record import Latency
from slimqwen.bench.latency.speedups import by_class_and_round, class_speedups, end_to_end
from slimqwen.bench.latency.tables import speedup_table
from slimqwen.bench.workload import Workload
from slimqwen.records import store
from slimqwen.records.replay import Outcome, Repeat


def replay(record: Latency, path: Path, repeat: Repeat) -> Outcome:
    """Time the requests of a record again, in turns with the variants that took turns with it.

    Raises:
        RecordError: its items are damaged.
        BenchError: no class of requests is the same.
        SlimqwenError: the measurement failed.
    """
    old_requests = by_class_and_round(store.read_items(path))
    variants = repeat.variants([record.variant, *record.interleaved_with])
    paths = latency.measure(
        variants,
        Workload.load(record.workload, repeat.root),
        rounds=record.rounds,
        records_folders=[repeat.folder / variant.name for variant in variants],
        **repeat.options,
    )
    repetition = paths[[variant.name for variant in variants].index(record.variant)]
    new_record = store.read(repetition, Latency)
    rows = class_speedups(
        (record, new_record), [old_requests, by_class_and_round(store.read_items(repetition))]
    )
    if not rows:
        raise BenchError(
            f"no class has the requests that it had then: {', '.join(record.classes)}; restore its workload and text"
        )
    changed_classes = [
        name
        for name, figures in record.classes.items()
        if name not in new_record.classes or figures.prompts_sha256 != new_record.classes[name].prompts_sha256
    ]
    table = speedup_table((record, new_record), (path, repetition), ("then", "now"), rows)
    ratios = end_to_end(rows)
    is_inside = all(row.interval[0] <= 1 <= row.interval[1] for row in ratios if row.interval)
    ratio_texts = ", ".join(map(str, ratios))
    summary = f"now, relative to then: {ratio_texts}; 1.00 lies {'inside' if is_inside else 'outside'}"
    if changed_classes:
        summary += f"; other prompts than then in {', '.join(changed_classes)}"
    return Outcome(repetition, is_inside and not changed_classes, summary, (table,))
