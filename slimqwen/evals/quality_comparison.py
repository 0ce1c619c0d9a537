"""Comparison of two quality records by item: paired differences and non-inferiority verdicts."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimqwen.evals.looks import Looks, read_looks
from slimqwen.evals.quality import MEASURE_NAMES, TABLE_NOTE, Quality, TaskScore
from slimqwen.records import pairing, store
from slimqwen.records.collection import StoredRecord
from slimqwen.records.provenance import source_note
from slimqwen.records.record import Table
from slimqwen.stats import intervals, non_inferiority
from slimqwen.stats.estimates import Difference

VERDICT_NOTE = (
    "Pass: the interval rules out a loss beyond the margin, which was written into the suite's file before any variant "
    "was measured, for all looks together. In brackets: the number of items planned to decide, before the first look."
)

_Items = list[dict[str, Any]]


@dataclass(frozen=True)
class TaskComparison:
    """Comparison of one task in two records: both scores, their difference and the verdict.

    Attributes:
        task: name of the task.
        measure: what is scored, such as exact_match.
        sign: 1 if a positive difference is a gain, else -1.
        first, second: scores of the two records, in the unit of the measure.
        difference: second minus first, paired over the items, with the interval of the judgement.
        discordance: items that only one side got right; None if items are not simply right or wrong.
        judgement: verdict on whether the second loses more than the margin.
        looks: the looks at the second side's items so far.
        items_planned: number of items planned to decide, before the first look; None if the suite assumes nothing.
    """

    task: str
    measure: str
    sign: int
    first: float
    second: float
    difference: Difference
    discordance: intervals.Discordance | None
    judgement: non_inferiority.Judgement
    looks: Looks
    items_planned: int | None

    @property
    def gain(self) -> float:
        """The difference of the scores, with its sign turned if less is better, so that a loss is negative."""
        return self.sign * self.difference.value


def pair_quality_records(first: Path, second: Path) -> tuple[Path, Path]:
    """Find quality records of two variants on the same items.

    Of each variant only records of the checkpoint that was scored last count. Of several pairs the one with the most
    items is chosen, so that a sample does not hide a full run; then a pair from the same hardware, because another
    instruction set changes responses too; then the newest.

    Args:
        first: folder of the first variant's records, experiments/<variant>.
        second: folder of the second variant's records.

    Raises:
        MissingRecordError: a variant has no quality record.
        NotComparableError: suite, limit or data files differ in every pair.
    """
    chosen = best_pair(*(current_records(folder) for folder in (first, second)))
    if chosen:
        return chosen[0].path, chosen[1].path
    return pairing.newest_pair(first, second, Quality, _command)


def best_pair(
    first: Iterable[StoredRecord[Quality]], second: Iterable[StoredRecord[Quality]]
) -> tuple[StoredRecord[Quality], StoredRecord[Quality]] | None:
    """Choose a record of each of two variants on the same items; None if no two are on the same items.

    Most items come first, then equal hardware, then the newest.
    """
    pairs = [(a, b) for a in first for b in second if a.record.basis == b.record.basis]
    return max(pairs, key=_pair_order, default=None)


def _pair_order(pair: tuple[StoredRecord[Quality], StoredRecord[Quality]]) -> tuple[int, bool, str, str]:
    a, b = pair
    hardware = [each.record.provenance.hardware.basis for each in pair]
    return a.record.item_count, hardware[0] == hardware[1], a.path.name, b.path.name


def current_records(folder: Path) -> list[StoredRecord[Quality]]:
    """Read a variant's quality records of the checkpoint that was scored last, newest first.

    Records of one side of a split are left out.

    Args:
        folder: experiments/<variant>.

    Raises:
        RecordError: a record is damaged.
    """
    entries = [
        StoredRecord(path, store.short_path(path), store.read_record(path, Quality))
        for path in store.records(folder, Quality)
    ]
    return of_newest_checkpoint([each for each in entries if each.record.split is None])


def of_newest_checkpoint(records: Sequence[StoredRecord[Quality]]) -> list[StoredRecord[Quality]]:
    """Keep the records of the same checkpoint as the first record, also those of another build of its recipe.

    Args:
        records: records of one variant, newest first.
    """
    checkpoints = [entry.record.provenance.checkpoint for entry in records]
    return [
        entry
        for entry, measured in zip(records, checkpoints, strict=True)
        if measured.has_recipe_of(checkpoints[0])
    ]


def largest_record(records: Iterable[StoredRecord[Quality]]) -> StoredRecord[Quality] | None:
    """The record with the most items, the newest of several with as many; None without records."""
    return max(records, key=lambda entry: (entry.record.item_count, entry.path.name), default=None)


def compare_quality(first: Path, second: Path) -> list[TaskComparison]:
    """Compare two quality records item by item; one comparison for each task.

    Args:
        first: file of the record that is compared with.
        second: file of the record that is judged.

    Raises:
        NotComparableError: the records were not made on the same items.
        RecordError: a record or its items are damaged.
    """
    first_record, second_record = store.read_record(first, Quality), store.read_record(second, Quality)
    cure = _command(second_record.variant, first_record)
    pairing.require_same(first, second, first_record.basis, second_record.basis, cure)
    first_items, second_items = _items_by_task(first), _items_by_task(second)
    looks = read_looks(second, second_items)
    rows = []
    for task, score in first_record.tasks.items():
        sides = first_items[task], second_items[task]
        first_ids, second_ids = ({f"items of {task}": [item["item"] for item in items]} for items in sides)
        pairing.require_same(first, second, first_ids, second_ids, "")
        rows.append(_compare_items(task, score, second_record.tasks[task].value, *sides, looks[task]))
    return rows


def _compare_items(
    task: str,
    score: TaskScore,
    second_value: float,
    first_items: _Items,
    second_items: _Items,
    looks: Looks,
) -> TaskComparison:
    """Compare one task; `score` is the first side's. Both sides must have the same items in the same order."""
    pairs = sorted(zip(first_items, second_items, strict=True), key=lambda pair: looks.order(pair[0]["item"]))
    values_a, values_b = ([pair[side]["value"] for pair in pairs] for side in (0, 1))
    clusters = [first.get("cluster") or number for number, (first, _) in enumerate(pairs)]
    numbers = [looks.first_look[first["item"]] for first, _ in pairs]
    weights = [first["weight"] for first, _ in pairs]
    means_a, totals = intervals.by_cluster(values_a, weights, clusters)
    means_b, _ = intervals.by_cluster(values_b, weights, clusters)
    is_right_or_wrong = set(means_a) | set(means_b) <= {0.0, 1.0}
    judgement = non_inferiority.judge_loss(
        score.sign * (means_b - means_a),
        None if is_right_or_wrong else totals,
        first_look=len({cluster for cluster, number in zip(clusters, numbers, strict=True) if number == 1}),
        margin=score.non_inferiority_margin,
    )
    change = intervals.mean(means_b - means_a, totals)
    low, high = sorted((score.sign * judgement.low, score.sign * judgement.high))
    return TaskComparison(
        task=task,
        measure=score.measure,
        sign=score.sign,
        first=score.value,
        second=second_value,
        difference=Difference(change.value, change.standard_error, low, high, change.count),
        discordance=intervals.mcnemar([v == 1 for v in means_a], [v == 1 for v in means_b])
        if is_right_or_wrong
        else None,
        judgement=judgement,
        looks=looks,
        items_planned=score.items_to_decide,
    )


def _items_by_task(path: Path) -> dict[str, _Items]:
    tasks: dict[str, _Items] = {}
    for item in store.read_items(path):
        tasks.setdefault(item["task"], []).append(item)
    return tasks


def comparison_table(first: Path, second: Path) -> Table:
    """Table of the paired differences of two quality records.

    Args:
        first: file of the record that is compared with.
        second: file of the record that is judged.

    Raises:
        NotComparableError: the records were not made on the same items.
        RecordError: a record or its items are damaged.
    """
    first_record, second_record = store.read_record(first, Quality), store.read_record(second, Quality)
    sizes = [record.provenance.checkpoint.size_bytes for record in (first_record, second_record)]
    rows = compare_quality(first, second)
    looks = (f"{first_record.task_name(row.task)}: {row.looks}." for row in rows if row.looks.is_worth_a_line)
    notes = (
        f"Checkpoints on disk: {sizes[0] / 1e6:,.1f} MB and {sizes[1] / 1e6:,.1f} MB, {sizes[0] / sizes[1]:.2f}x.",
        f"{TABLE_NOTE} p: McNemar's exact test.",
        VERDICT_NOTE,
        *looks,
        source_note(first_record, first),
        source_note(second_record, second),
    )
    first_name, second_name = first_record.variant, second_record.variant
    columns: dict[str, Callable[[TaskComparison], object]] = {
        "task": lambda row: first_record.task_name(row.task),
        "measure": lambda row: MEASURE_NAMES.get(row.measure, row.measure),
        first_name: lambda row: f"{row.first:.3f}",
        f"{second_name} again" if first_name == second_name else second_name: lambda row: f"{row.second:.3f}",
        "change ± SE": lambda row: f"{row.difference.value:+.3f} ± {row.difference.standard_error:.3f}",
        "95 % interval": lambda row: f"{row.difference.low:+.3f} to {row.difference.high:+.3f}",
        "p": lambda row: f"{row.discordance.p_value:.3f}" if row.discordance else None,
        "margin": lambda row: f"{row.judgement.margin:g}",
        "verdict": lambda row: row.judgement.verdict,
        "items (planned)": lambda row: f"{row.difference.count}{items_planned(row)}",
    }
    title = f"Quality: {first_name} and {second_name}, paired by item"
    return Table.from_rows(title, rows, columns, *notes, text_columns=2)


def items_planned(row: TaskComparison) -> str:
    """End of a table's cell: the number of items planned to decide, such as " (1,160)"; empty without a plan."""
    return f" ({row.items_planned:,})" if row.items_planned else ""


def _command(variant: str, like: Quality) -> str:
    """The command that scores a variant on the same items as the record `like`."""
    extent = "" if like.limit == "auto" else " --full" if like.limit is None else f" --limit {like.limit}"
    return f"slimqwen eval quality --variant {variant} --suite {like.suite}{extent}"
