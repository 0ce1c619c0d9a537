"""The dated log of results: every record that says something of a variant, the negative ones included.

A line states what the record found against the variant's baseline, by the same rules as the tables: paired, with the
interval that the verdict rests on. Where there is nothing to compare it with, it states the figures alone.
"""

from dataclasses import dataclass
from pathlib import Path

from slimqwen import variant as variants
from slimqwen.errors import SlimqwenError
from slimqwen.records import collection
from slimqwen.records.collection import Collection, Problem, StoredRecord
from slimqwen.records.provenance import commit_name
from slimqwen.records.record import Record
from slimqwen.records.split import split_of


@dataclass(frozen=True)
class Entry:
    """One line of the log.

    Attributes:
        ended: when the measurement ended, UTC to the second.
        variant: that was measured; empty for an exploration of none.
        kind: of the record.
        finding: verdict, headline figure and its interval.
        commit: that it was measured at, `+changes` where the code differed from it.
        location: of the record, from the repository's root.
    """

    ended: str
    variant: str
    kind: str
    finding: str
    commit: str
    location: str


def entries(
    root: Path, *, variant: str | None = None, last: int | None = None
) -> tuple[list[Entry], tuple[Problem, ...]]:
    """The log, newest first.

    Args:
        variant: of this one alone.
        last: so many lines at most; None for all. Findings take time where intervals are computed.

    Returns:
        The lines, and what could not be read.

    Raises:
        ConfigError: no such variant.
    """
    if variant is not None:
        variants.load(variant, root)
    everything = collection.collect(root)
    chosen = [source for source in everything.records if variant in (None, source.variant)]
    chosen.sort(key=lambda source: (_ended(source), source.location), reverse=True)
    shown = chosen[: len(chosen) if last is None else last]
    return [_entry(source, everything) for source in shown], everything.problems


def _entry(source: StoredRecord[Record], among: Collection) -> Entry:
    try:
        finding = source.record.finding(source.path, among)
        if split := split_of(source.record):
            finding = f"{split.side} split: {finding}"
    except SlimqwenError as error:
        # A line of its own, so that damaged items do not take the whole log away.
        finding = str(error)
    made_at = commit_name(source.record.provenance.git)
    return Entry(_ended(source), source.variant, source.kind, finding, made_at, source.location)


def _ended(source: StoredRecord[Record]) -> str:
    return source.record.provenance.ended
