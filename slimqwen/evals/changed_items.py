"""Items on which two quality records differ, worst first, with what is needed to read them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimqwen.evals.quality import Quality
from slimqwen.evals.runaways import runs_away
from slimqwen.records import store
from slimqwen.records.record import Table

_LONGEST_CELL = 240


@dataclass(frozen=True)
class ChangedItem:
    """An item with one response from each of two records that differ in score or in how they end.

    Attributes:
        task: name of the task without the suite's name before it.
        first, second: the items of the two records.
        gain: score of the second minus the first, in units of the task's margin; negative if the second is worse.
        runaway_gain: -1 where only the second response runs away, 1 where only the first does, else 0.
    """

    task: str
    first: dict[str, Any]
    second: dict[str, Any]
    gain: float
    runaway_gain: int


def list_changed_items(first: Path, second: Path) -> list[ChangedItem]:
    """List the items whose score changed, or whose response ran away on one side only; worst first.

    A score of right or wrong has changed if it differs, any other if it differs by more than the task's margin.

    Args:
        first, second: files of two quality records.

    Raises:
        RecordError: a record or its items are damaged.
    """
    return sorted(_changed_items(first, second), key=lambda item: (item.gain, item.runaway_gain))


def _changed_items(first: Path, second: Path) -> Iterator[ChangedItem]:
    record = store.read_record(first, Quality)
    before = {_key(item): item for item in store.read_items(first)}
    for item in store.read_items(second):
        other = before.get(_key(item))
        score = record.tasks.get(item["task"])
        if other is None or score is None:
            continue
        gain = (item["value"] - other["value"]) * score.sign
        is_right_or_wrong = {item["value"], other["value"]} <= {0.0, 1.0}
        runaway_gain = int(runs_away(other)) - int(runs_away(item))
        if (gain if is_right_or_wrong else abs(gain) > score.non_inferiority_margin) or runaway_gain:
            margin = score.non_inferiority_margin or 1.0
            yield ChangedItem(record.task_name(item["task"]), other, item, gain / margin, runaway_gain)


def _key(item: dict[str, Any]) -> tuple[str, str, int]:
    return item["task"], item["item"], item.get("repeat", 0)


def changed_items_table(first: Path, second: Path, *, most: int | None = None) -> Table | None:
    """Table of the items that changed, worst first; None if none did.

    Args:
        first, second: files of two quality records.
        most: number of rows, None for all.

    Raises:
        RecordError: a record or its items are damaged.
    """
    changed = list_changed_items(first, second)
    if not changed:
        return None
    names = [store.read_record(path, Quality).variant for path in (first, second)]
    if names[0] == names[1]:
        names[1] += " again"
    rows = tuple(
        (
            row.task,
            _cell(row.second.get("question") or row.first.get("question") or f"item {row.second['item']}"),
            _cell(row.second.get("expected") or row.first.get("expected")),
            *(_response(item) for item in (row.first, row.second)),
            f"{row.first['value']:.3g} → {row.second['value']:.3g}",
        )
        for row in changed[:most]
    )
    worse = sum(row.gain < 0 or (row.gain == 0 and row.runaway_gain < 0) for row in changed)
    shown = f"the {len(rows)} worst of " if len(rows) < len(changed) else ""
    return Table(
        f"Items that changed: {shown}{len(changed)}, of which {worse} are worse",
        ("task", "question", "expected", *names, "score"),
        rows,
        _notes(changed),
        text_columns=6,
    )


def _notes(changed: Sequence[ChangedItem]) -> tuple[str, ...]:
    if all(row.second.get("question") or row.first.get("question") for row in changed):
        return ()
    return ("Records of before questions were kept name an item by its hash.",)


def _response(item: dict[str, Any]) -> str:
    if item.get("output") is None:
        return "-"
    ends = [
        name
        for name, holds in (
            ("token limit", item.get("truncated")),
            ("runs away", runs_away(item) and not item.get("truncated")),
        )
        if holds
    ]
    return _cell(item["output"]) + (f" ({', '.join(ends)})" if ends else "")


def _cell(text: str | None) -> str:
    """Text on one line, without its middle if it is long; a dash for none."""
    line = " ".join((text or "").split())
    half = _LONGEST_CELL // 2
    return (line if len(line) <= _LONGEST_CELL else f"{line[:half]} […] {line[-half:]}") or "-"
