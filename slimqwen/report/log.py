"""The dated log of results: one line per record, negative results included.

A line compares the record with the variant's baseline, by the same rules as the tables: paired, with the interval of
the verdict. Without a record to compare with, it has the figures alone.
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
        variant: measured variant; empty for a record of no variant.
        finding: verdict, headline figure and its interval.
        commit: measured commit, with `+changes` where the code differed from it.
        location: path of the record, from the repository's root.
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
        variant: the only variant to list; None for all.
        last: largest number of lines; None for all. Findings take time where intervals are computed.

    Returns:
        The lines, and the unreadable files.

    Raises:
        ConfigError: no such variant.
    """
    if variant is not None:
        variants.load(variant, root)
    records = collection.collect(root)
    chosen = [source for source in records.records if variant in (None, source.variant)]
    chosen.sort(key=lambda source: (source.ended, source.location), reverse=True)
    return [_entry(source, records) for source in chosen[:last]], records.problems


def _entry(source: StoredRecord[Record], records: Collection) -> Entry:
    try:
        finding = source.record.finding(source.path, records)
        if split := split_of(source.record):
            finding = f"{split.side} split: {finding}"
    except SlimqwenError as error:
        # Damaged items cost one line, not the whole log.
        finding = str(error)
    commit = commit_name(source.record.provenance.git)
    return Entry(source.ended, source.variant, source.kind, finding, commit, source.location)
