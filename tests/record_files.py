"""Records for tests: written from plain fields, as a measurement would write them."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slimqwen.records import registry, store
from slimqwen.records.record import Record

DATA = Path(__file__).parent / "records" / "data"


def example(kind: str, **changes: Any) -> dict[str, Any]:
    """A record of a kind as a measurement hands it to the store, everything but its items; some fields changed."""
    fields: dict[str, Any] = json.loads((DATA / f"{kind}.json").read_text())
    return fields | changes


def host_load(*, busy: bool) -> dict[str, Any]:
    """The load of a host as provenance holds it."""
    delays = {"client_delay_ms": None, "server_delay_ms": None}
    return {"busy": busy, "seconds": 1.0, "other_share": 0.6, **delays}


def record_of(fields: Mapping[str, Any] | Record, **changes: Any) -> Record:
    """The record with these fields as JSON, some of them changed; without its items."""
    plain = {**(fields.as_json() if isinstance(fields, Record) else fields), **changes}
    plain.pop("items", None)
    return registry.kinds()[plain["schema"].partition("/")[0]].model_validate(plain)


def write(
    folder: Path, fields: Mapping[str, Any] | Record, items: Iterable[Mapping[str, Any]] | None = None
) -> Path:
    """Write a record with these fields as JSON; returns its file."""
    return store.write_record(folder, record_of(fields), items)


def draft_items(*groups: Sequence[int]) -> list[dict[str, Any]]:
    """Items of an acceptance record: 10 greedy drafts a group, so many of each group accepted at each position."""
    return [
        {"depth": len(accepted), "class": "short", "temperature": 0.0, "group": number, "drafts": 10,
         "accepted_per_position": list(accepted), "output_tokens": 10 + sum(accepted), "seconds": 1.0}
        for number, accepted in enumerate(groups)
    ]  # fmt: skip
