"""Records as pandas data frames: `slimqwen.records.frame.load()` has a row for each figure of every record.

frame = load()
scores = frame[(frame.kind == "quality") & (frame.measure == "exact_match")]
scores.pivot_table("value", "variant", "group", aggfunc="first")
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas  # type: ignore[import-untyped]

from slimqwen.records import provenance
from slimqwen.records.collection import StoredRecord, collect
from slimqwen.records.record import Record
from slimqwen.records.split import split_of
from slimqwen.variant import repository_root

COLUMNS = (
    "variant", "kind", "location", "started", "ended", "commit", "dirty", "hardware", "checkpoint", "subject",
    "group", "measure", "value", "standard_error", "low", "high", "count", "unit",
)  # fmt: skip

_SUBJECTS = ("suite", "workload", "settings_name")
_NUMBERS = ["value", "standard_error", "low", "high", "count"]


def load(root: Path | None = None) -> pandas.DataFrame:
    """Every figure of every readable record of experiments/ and results/.

    Args:
        root: the repository; by default the one that this package is installed from.

    Returns:
        A row for each figure. `group` is the task, class, mode or other part of the record, nested ones joined by
        "/"; `measure` the figure's name, for statistics of a distribution as `ttft_ms.median`; `subject` the suite,
        workload or settings, and the side of the split where only that was measured; `low` and `high` a 95 % interval,
        where the record holds one; `unit` is empty where the ending of the figure's name gives none. `started` and
        `ended` are in UTC. Newer records come first within a variant and kind.
    """
    rows = [
        {**_circumstances(entry), **figure}
        for entry in collect(root or repository_root()).records
        for figure in _figures(entry.record)
    ]
    frame = pandas.DataFrame(rows, columns=list(COLUMNS))
    frame[_NUMBERS] = frame[_NUMBERS].astype("float64")
    for moment in ("started", "ended"):
        frame[moment] = pandas.to_datetime(frame[moment], utc=True)
    return frame


def _circumstances(entry: StoredRecord[Record]) -> dict[str, Any]:
    block, split = entry.record.provenance, split_of(entry.record)
    subject = next((value for name in _SUBJECTS if (value := getattr(entry.record, name, None))), None)
    return {
        "variant": entry.variant,
        "kind": entry.kind,
        "location": entry.location,
        "started": block.started,
        "ended": block.ended,
        "commit": block.git.commit,
        "dirty": block.git.dirty,
        "hardware": provenance.hardware_name(block.hardware),
        "checkpoint": block.checkpoint_digest,
        "subject": f"{subject}, {split.side} split" if split else subject,
    }


def _figures(record: Record) -> Iterator[dict[str, Any]]:
    for name, figure in record.figures().items():
        group, _, measure = name.rpartition("/")
        yield {"group": group, "measure": measure, **vars(figure)}
    checkpoint = record.provenance.checkpoint
    if checkpoint and checkpoint.size_bytes is not None:
        yield {"group": "", "measure": "size_bytes", "value": checkpoint.size_bytes, "unit": "bytes"}
