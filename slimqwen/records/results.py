"""results/: one-off explorations, each a record with its provenance. One that is made again is another file."""

import glob
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slimqwen import checkpoint
from slimqwen.records import migrations, provenance, store
from slimqwen.variant import Variant

_STAMP = "????-??-??T??????Z"


def stem(record: store.Record) -> str:
    """What an exploration's files are called, but for their suffix: <kind>_<variant>_<UTC time of its end>.

    Args:
        record: in the present version of its schema; without a variant for what is of none.
    """
    kind, _ = migrations.named(record["schema"])
    ended = record["provenance"]["ended"].replace(":", "")
    return "_".join(filter(None, (kind, record.get("variant"), ended)))


def latest(
    root: Path, kind: str, variant: str, where: Callable[[store.Record], bool] = lambda record: True
) -> store.Record | None:
    """The newest exploration of a kind and variant that `where` accepts, None where there is none.

    Raises:
        RecordError: a damaged record is in the way.
    """
    pattern = f"{glob.escape(f'{kind}_{variant}')}_{_STAMP}.json"
    newest_first = sorted((root / "results").glob(pattern), reverse=True)
    return next((record for record in map(store.read, newest_first) if where(record)), None)


def write(
    kind: str,
    one: Variant,
    found: Mapping[str, Any],
    *,
    command: Sequence[str],
    started: str,
    **inputs: Any,
) -> Path:
    """Add the record of an exploration to results/.

    Args:
        kind: of the exploration, also its schema's name.
        one: the variant whose checkpoint was explored.
        found: the figures.
        command: the script and its arguments.
        started: `provenance.utc_now` at the beginning; the end is now.
        inputs: what else decided the figures: digests, seeds.

    Returns:
        The record's path.

    Raises:
        RecordError: it breaks its schema, or has none; nothing is written.
    """
    block = provenance.circumstances(one.root, command, started)
    block |= {"checkpoint": checkpoint.digest(one.weights), **inputs}
    return add(one.root, {"schema": f"{kind}/1", "variant": one.name, **found, "provenance": block})


def add(root: Path, record: store.Record) -> Path:
    """Add a record to results/, under the name that `stem` gives it.

    Returns:
        The record's path.

    Raises:
        RecordError: it breaks its schema, or a record of its kind, variant and second exists; nothing is written.
    """
    path = root / "results" / f"{stem(record)}.json"
    text = store.serialise(record, store.place(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    store.publish(path, text.encode())
    return path
