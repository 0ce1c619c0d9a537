"""Looks: how often a variant was scored on a growing set of items of a task, and in which order the items came.

A verdict that holds for all looks together (`stats.sequential`) needs an order of items that was fixed before the first
look. It is the order of the looks and, within one, an order that depends on the items' content alone.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimqwen.evals.quality import Quality
from slimqwen.records import store


@dataclass(frozen=True)
class Looks:
    """The looks at a task's items up to and with a record.

    Attributes:
        first_look: hash of an item -> number of the first look in which it was scored, from 1.
        dropped_since: date of the last earlier look whose items are not all among the present ones, so that the count
            began anew; None if there is none.
    """

    first_look: dict[str, int]
    dropped_since: str | None

    @property
    def count(self) -> int:
        """The number of the latest look, from 1."""
        return max(self.first_look.values(), default=1)

    @property
    def is_worth_a_line(self) -> bool:
        """Whether a table should mention the looks: there was more than one, or their count began anew."""
        return self.count > 1 or self.dropped_since is not None

    def order(self, item: str) -> tuple[int, bytes]:
        """Sort key of an item, which its hash names: by look, then at random, as neighbours in a file may be alike."""
        return self.first_look[item], hashlib.sha256(item.encode()).digest()

    def __str__(self) -> str:
        anew = (
            f"; counted anew, because items of the look of {self.dropped_since} were edited or left out"
            if self.dropped_since
            else ""
        )
        return f"look {self.count}{anew}"


def read_looks(
    path: Path, items: Mapping[str, Iterable[Mapping[str, Any]]] | None = None
) -> dict[str, Looks]:
    """Find how often each task of a quality record was looked at, from the record and the earlier ones beside it.

    A look scores a new set of items of the same suite with the same variant and a build of the same checkpoint. A look
    that lacks an item of an earlier look begins a new count.

    Args:
        path: file of the record.
        items: the record's items by task, if they were read already; None to read them.

    Returns:
        Name of the task -> its looks.

    Raises:
        RecordError: the record or its items are damaged; damaged earlier records are left out.
    """
    record = store.read_record(path, Quality)
    looks: dict[str, Looks] = {}
    earlier = list(_earlier_looks(path, record))
    ids = {task: frozenset(item["item"] for item in of_task) for task, of_task in (items or {}).items()}
    for task, present in (ids or _items_by_task(path)).items():
        sets: list[frozenset[str]] = []
        dropped_since = None
        for date, by_task in earlier:
            seen = by_task.get(task, frozenset())
            if seen - present:
                sets, dropped_since = [], date
            elif seen:
                sets.append(seen)
        first_look: dict[str, int] = {}
        for seen in sorted([*dict.fromkeys(sets), present], key=len):
            new = seen - first_look.keys()
            number = max(first_look.values(), default=0) + 1
            first_look |= dict.fromkeys(new, number)
        looks[task] = Looks(first_look, dropped_since)
    return looks


def _earlier_looks(path: Path, record: Quality) -> Iterator[tuple[str, dict[str, frozenset[str]]]]:
    """Yield date and items by task of the earlier records of a series, the oldest first."""
    for other in reversed(store.records(path.parent, Quality)):
        if other.name >= path.name:
            continue
        try:
            before = store.read_record(other, Quality)
            same_recipe = before.provenance.checkpoint.has_recipe_of(record.provenance.checkpoint)
            if same_recipe and _series(before) == _series(record):
                yield before.provenance.ended[:10], _items_by_task(other)
        except store.RecordError:
            continue


def _series(record: Quality) -> tuple[object, ...]:
    settings = {task: (score.measure, score.settings) for task, score in record.tasks.items()}
    return record.suite, str(record.split), settings


def _items_by_task(path: Path) -> dict[str, frozenset[str]]:
    tasks: dict[str, set[str]] = {}
    for item in store.read_items(path):
        tasks.setdefault(item["task"], set()).add(item["item"])
    return {task: frozenset(items) for task, items in tasks.items()}
