"""Records on disk: JSON files that are validated both ways, appear whole, and are never overwritten.

`<kind>_<UTC time>.json` is the record, `<kind>_<UTC time>.items.jsonl` beside it the per-item results it is
computed from. A variant's records lie in experiments/<variant>/.
"""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from slimqwen.errors import SlimqwenError

Record = dict[str, Any]
"""A record as JSON gives it: the schemas are its type."""

_SCHEMAS = Path(__file__).parent / "schemas"
_MADE_BY = {"engine": "check-engine", "acceptance": "sweep-k", "gate": "gate"}
"""The Make target of a kind of record, where it is not eval-<kind>."""


class RecordError(SlimqwenError):
    """A record that breaks its schema, cannot be read, or would overwrite another."""


class MissingRecordError(SlimqwenError):
    """No record of that kind; names the command that makes one."""


def validate(record: Mapping[str, Any], place: str) -> None:
    """Check a record against the schema it names in "schema", such as quality/1.

    Raises:
        RecordError: names `place`, the offending field and why.
    """
    name = record.get("schema")
    known = {s["properties"]["schema"]["const"]: s for s in _schemas().values() if "properties" in s}
    if name not in known:
        raise RecordError(f"{place}: schema {name!r} is unknown to this version; it knows {', '.join(known)}")
    validator = Draft202012Validator(known[name], registry=_registry())
    error = min(validator.iter_errors(record), key=lambda e: list(map(str, e.path)), default=None)
    if error is not None:
        where = "/".join(map(str, error.path)) or "the record"
        raise RecordError(f"{place}: {where}: {error.message}")


def has_schema(kind: str) -> bool:
    """Whether records of a kind follow a schema."""
    return kind in _schemas()


def write(folder: Path, body: Mapping[str, Any], items: Iterable[Mapping[str, Any]]) -> Path:
    """Add a record and its items to a folder; the record's appearance is the last thing that happens.

    Args:
        folder: made if missing.
        body: the record without "items", which is filled in here.
        items: its per-item results.

    Returns:
        The record's path.

    Raises:
        RecordError: it breaks its schema, or a record of this kind and second exists; nothing is written.
    """
    kind = str(body.get("schema", "")).partition("/")[0]
    stem = f"{kind}_{_stamp()}"
    lines = [json.dumps(item, ensure_ascii=False, allow_nan=False, sort_keys=True) for item in items]
    content = "".join(f"{line}\n" for line in lines).encode()
    items_path = folder / f"{stem}.items.jsonl"
    described = {"file": items_path.name, "sha256": hashlib.sha256(content).hexdigest(), "count": len(lines)}
    record = {**body, "items": described}
    path = folder / f"{stem}.json"
    validate(record, path.name)
    folder.mkdir(parents=True, exist_ok=True)
    _publish(items_path, content)
    try:
        _publish(path, (json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode())
    except BaseException:
        items_path.unlink()
        raise
    return path


def read(path: Path) -> Record:
    """Read and validate one record.

    Raises:
        RecordError: names the file and what is wrong with it.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecordError(f"{_place(path)}: no such record") from None
    except OSError as error:
        raise RecordError(f"{_place(path)}: {error.strerror}") from error
    except ValueError as error:
        raise RecordError(
            f"{_place(path)}: not JSON ({error}); `git checkout` restores a committed one"
        ) from error
    if not isinstance(record, dict):
        raise RecordError(f"{_place(path)}: not a JSON object")
    validate(record, _place(path))
    return record


def read_items(path: Path) -> list[dict[str, Any]]:
    """The per-item results of the record at `path`, checked against the digest that it holds.

    Raises:
        RecordError: the record or its items are damaged or missing.
    """
    described = read(path)["items"]
    items_path = path.with_name(described["file"])
    try:
        content = items_path.read_bytes()
    except OSError as error:
        raise RecordError(f"{_place(items_path)}: {error.strerror}; {path.name} needs it") from error
    if hashlib.sha256(content).hexdigest() != described["sha256"]:
        raise RecordError(f"{_place(items_path)}: not the items that {path.name} was computed from")
    return [json.loads(line) for line in content.splitlines()]


def records(folder: Path, kind: str) -> Iterator[Path]:
    """Paths of the records of a kind in a folder, newest first."""
    yield from sorted(folder.glob(f"{kind}_*.json"), reverse=True)


def latest(folder: Path, kind: str, where: Callable[[Record], bool] = lambda record: True) -> Path:
    """The newest record of a kind in a folder that `where` accepts.

    Args:
        folder: experiments/<variant>, named after its variant.
        kind: quality or latency.
        where: a condition on the record.

    Raises:
        MissingRecordError: there is none; names the command that makes one.
        RecordError: a damaged record is in the way.
    """
    for path in records(folder, kind):
        if where(read(path)):
            return path
    raise MissingRecordError(
        f"no {kind} record that fits in {folder.parent.name}/{folder.name}; "
        f"`make {_MADE_BY.get(kind, f'eval-{kind}')} VARIANT={folder.name}` makes one"
    )


def read_measurements(folder: Path) -> Record:
    """A variant's measurements.json, validated.

    Raises:
        RecordError: names the file and what is wrong with it.
    """
    return read(folder / "measurements.json")


@cache
def _schemas() -> dict[str, Record]:
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in _SCHEMAS.glob("*.json")}


@cache
def _registry() -> Registry[Any]:
    return Registry().with_resources(
        (f"{kind}.json", Resource.from_contents(schema)) for kind, schema in _schemas().items()
    )


def _stamp() -> str:
    return f"{datetime.now(UTC):%Y-%m-%dT%H%M%SZ}"


def _publish(path: Path, content: bytes) -> None:
    """Make the file appear whole, or not at all if one of that name is there."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        Path(temporary).chmod(0o644)  # mkstemp gives 0600, which another user's `make report` cannot read
        os.link(temporary, path)  # a rename would replace an existing file, a link refuses
    except FileExistsError:
        raise RecordError(f"{_place(path)} exists and records are never overwritten; run again") from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            Path(temporary).unlink()


def _place(path: Path) -> str:
    """The last folders of a path: enough to find it, the same on every machine."""
    return "/".join(path.parts[-3:])
