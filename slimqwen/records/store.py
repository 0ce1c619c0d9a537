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
from types import MappingProxyType
from typing import Any

from jsonschema_rs import Draft202012Validator, Registry

from slimqwen.errors import SlimqwenError
from slimqwen.records import migrations

Record = dict[str, Any]
"""A record as JSON gives it: the schemas are its type."""

_SCHEMAS = Path(__file__).parent / "schemas"
_MADE_BY = {"engine": "check-engine", "acceptance": "sweep-k", "gate": "gate"}
"""The Make target of a kind of record, where it is not eval-<kind>."""


class RecordError(SlimqwenError):
    """A record that breaks its schema, cannot be read, or would overwrite another."""


class MissingRecordError(SlimqwenError):
    """No record of that kind; names the command that makes one."""


def validate(record: Mapping[str, Any], place: str) -> Record:
    """Bring a record to the present version of the schema it names in "schema", such as quality/1, and check it.

    Returns:
        The record in that version; the one given is left as it is.

    Raises:
        RecordError: names `place`, the offending field and why.
    """
    present = in_present_form(record, place)
    kind, version = migrations.named(record["schema"])
    known = present_versions()
    if kind not in known:
        raise RecordError(
            f"{place}: schema {record['schema']!r} is unknown here, where {', '.join(known.values())} are known; "
            "update this checkout, or move the file elsewhere"
        )
    if version > migrations.named(known[kind])[1]:
        raise RecordError(
            f"{place}: schema {record['schema']!r} is newer than {known[kind]}, known here; update this checkout"
        )
    try:
        # Half of a surrogate pair: JSON can spell it, no file or page can hold it.
        json.dumps(present, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise RecordError(f"{place}: holds what is no text ({error}); measure again") from None
    errors = ((list(map(str, e.instance_path)), e.message) for e in _validator(kind).iter_errors(present))
    first = min(errors, default=None)
    if first is not None:
        raise RecordError(f"{place}: {'/'.join(first[0]) or 'the record'}: {first[1]}")
    return present


def in_present_form(record: Mapping[str, Any], place: str) -> Record:
    """The record brought to the present version of its schema, but not held against it.

    Raises:
        RecordError: names `place`; the schema has no version, or the record is not of that version's form.
    """
    try:
        return migrations.to_present(record)
    except migrations.MigrationError as error:
        raise RecordError(f"{place}: {error}") from error


@cache
def present_versions() -> Mapping[str, str]:
    """Kind -> its present schema, such as quality/2; what to write, and what `read` returns."""
    return MappingProxyType(
        {
            kind: schema["properties"]["schema"]["const"]
            for kind, schema in sorted(_schemas().items())
            if "properties" in schema
        }
    )


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
    path = folder / f"{stem}.json"
    text = serialise({**body, "items": described}, path.name)
    folder.mkdir(parents=True, exist_ok=True)
    publish(items_path, content)
    try:
        publish(path, text.encode())
    except BaseException:
        items_path.unlink()
        raise
    return path


def serialise(record: Mapping[str, Any], place: str) -> str:
    """The text of a record's file.

    Raises:
        RecordError: it breaks its schema, or is written in the form of an older one.
    """
    try:
        text = json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    except ValueError as error:
        raise RecordError(f"{place}: a figure of it is no number ({error}); measure again") from error
    written = json.loads(text)
    if validate(written, place) != written:
        raise RecordError(f"{place}: written in the form of an older schema, which is only read")
    return text


def read(path: Path) -> Record:
    """Read and validate one record, in the present version of its schema.

    Raises:
        RecordError: names the file and what is wrong with it.
    """
    return validate(parse(path), place(path))


def parse(path: Path) -> Record:
    """The JSON object in a file, whatever it is of.

    Raises:
        RecordError: names the file and what is wrong with it.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
    except FileNotFoundError:
        raise RecordError(f"{place(path)}: no such record") from None
    except OSError as error:
        raise RecordError(f"{place(path)}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise RecordError(
            f"{place(path)}: not JSON ({error}); `git checkout` restores a committed one"
        ) from error
    if not isinstance(record, dict):
        raise RecordError(f"{place(path)}: not a JSON object")
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
        raise RecordError(f"{place(items_path)}: {error.strerror}; {path.name} needs it") from error
    if hashlib.sha256(content).hexdigest() != described["sha256"]:
        raise RecordError(f"{place(items_path)}: not the items that {path.name} was computed from")
    try:
        return [json.loads(line) for line in content.splitlines()]
    except ValueError as error:
        raise RecordError(f"{place(items_path)}: not a JSON object a line ({error})") from error


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
def _validator(kind: str) -> Draft202012Validator:
    # A validator is dear to build and cheap to ask.
    resources = [(f"json-schema:///{name}.json", schema) for name, schema in _schemas().items()]
    return Draft202012Validator(_schemas()[kind], registry=Registry(resources))


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _stamp() -> str:
    return f"{datetime.now(UTC):%Y-%m-%dT%H%M%SZ}"


def publish(path: Path, content: bytes, *, replace: bool = False) -> None:
    """Make a file appear whole and last, in a folder that is there.

    Args:
        path: of the file.
        content: of the file.
        replace: put it in the place of another, in one step.

    Raises:
        RecordError: without `replace`, one of that name is there; it stays as it is.
    """
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        Path(temporary).chmod(0o644)  # mkstemp gives 0600, which another user's `make report` cannot read
        if replace:
            Path(temporary).replace(path)
        else:
            os.link(temporary, path)  # a rename would replace an existing file, a link refuses
    except FileExistsError:
        raise RecordError(f"{place(path)} exists and records are never overwritten; run again") from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            Path(temporary).unlink()


def place(path: Path) -> str:
    """The last folders of a path: enough to find it, the same on every machine."""
    return "/".join(path.parts[-3:])
