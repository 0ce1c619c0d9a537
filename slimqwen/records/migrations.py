"""Migration of old records: one function for each step from a version of a schema to the next.

Files on disk stay as they were written; `store` applies the steps whenever it reads one. A step fills a new field with
the value that held when the old form was written, or null if that is unknown. The provenance block has its own
versions, because all kinds share it.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from slimqwen.errors import SlimqwenError

Record = dict[str, Any]


class MigrationError(SlimqwenError):
    """A record without the fields of its schema version."""


def named(schema: object) -> tuple[str, int]:
    """The kind and the version in the name of a schema, such as quality/2.

    Raises:
        MigrationError: the name is not <kind>/<version>.
    """
    kind, _, version = schema.partition("/") if isinstance(schema, str) else ("", "", "")
    if not kind or not version.isdecimal():
        raise MigrationError(f"schema {schema!r} is no <kind>/<version>; it is no record, move it elsewhere")
    return kind, int(version)


def to_present(record: Mapping[str, Any]) -> Record:
    """The record and its provenance block, both migrated to the present version.

    Raises:
        MigrationError: a schema is not <kind>/<version>, or fields of that version are missing.
    """
    present = _migrate(dict(record), *named(record.get("schema")))
    block = present.get("provenance")
    if isinstance(block, Mapping):
        # The first version of the block does not name its schema.
        schema = block.get("schema", "provenance/1")
        present["provenance"] = _migrate({"schema": schema, **block}, *named(schema))
    return present


def _migrate(record: Record, kind: str, version: int) -> Record:
    while (step := _STEPS.get((kind, version))) is not None:
        try:
            record = step(record)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise MigrationError(f"not what {kind}/{version} has ({error!r})") from error
        version += 1
        record["schema"] = f"{kind}/{version}"
    return record


def _quality_1(record: Record) -> Record:
    """Before chats, repeats, clusters and answers that outlive an interruption; later files have some of these."""
    return {
        "endpoint": "completions",
        "answers_of_earlier_run": 0,
        **record,
        "tasks": {
            name: {
                "cluster_count": row["item_count"],
                "items_to_decide": None,
                "output_count": None,
                "output_tokens": None,
                "settings": {},
                **row,
            }
            for name, row in record["tasks"].items()
        },
    }


def _provenance_1(block: Record) -> Record:
    """Threads were recorded in the environment of a server; for an engine in the measuring process they were not."""
    threads = block.get("environment", {}).get("OMP_NUM_THREADS")
    return {"threads": None if threads is None else int(threads), **block}


def _provenance_2(block: Record) -> Record:
    """Records in results/ identified a checkpoint by its digest alone; those in experiments/ had path and size too."""
    digest = block.get("checkpoint")
    return {**block, "checkpoint": {"digest": digest}} if isinstance(digest, str) else block


def _first_request_1(record: Record) -> Record:
    """Before `rules` became `system_prompt`, and before questions of a kind had different lengths."""
    tokens = record["question_tokens"]
    lengths_differ = not isinstance(tokens, int)
    present = {name: value for name, value in record.items() if name != "rules"}
    return {
        **present,
        "question_tokens": tokens if lengths_differ else {"chat": tokens, "completion": tokens},
        "lengths_differ": lengths_differ,
        "system_prompt": record["rules"],
    }


def _acceptance_1(record: Record) -> Record:
    """Before depths were chosen by batch size."""
    return {**record, "schedule": None}


_STEPS: Mapping[tuple[str, int], Callable[[Record], Record]] = MappingProxyType(
    {
        ("acceptance", 1): _acceptance_1,
        ("first_request", 1): _first_request_1,
        ("quality", 1): _quality_1,
        ("provenance", 1): _provenance_1,
        ("provenance", 2): _provenance_2,
    }
)
