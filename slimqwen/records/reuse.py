"""Reuse of records: finds a record that a new measurement would only repeat."""

from collections.abc import Callable
from pathlib import Path

from slimqwen.records import provenance, store
from slimqwen.records.split import Split, split_of
from slimqwen.records.store import AnyRecord
from slimqwen.serving.command import ServerCommand
from slimqwen.variant import Variant


def find_reusable(
    variant: Variant,
    kind: type[AnyRecord],
    folder: Path,
    split: Split | None,
    condition: Callable[[AnyRecord], bool],
) -> Path | None:
    """Find the newest record of a variant that a new measurement would only repeat; None if there is none.

    Args:
        folder: folder of the variant's records.
        split: side of the split that was measured; None for all items.
        condition: whether a record was made with the settings that are asked for.
    """
    for path in store.records(folder, kind):
        record = store.read_record(path, kind)
        if split_of(record) == split and condition(record):
            server = ServerCommand.resolve(variant)
            if provenance.still_holds(record.provenance, server, kind.deciding_flags):
                return path
    return None
