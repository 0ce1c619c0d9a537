"""Reads and writes records: JSON files that are validated at every access, written atomically and never overwritten.

experiments/<variant>/<kind>_<UTC time>.json is a record of a variant; where a kind has per-item results, from which its
figures are computed, they are in <kind>_<UTC time>.items.jsonl beside it.
"""

import contextlib
import hashlib
import io
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar, overload

from pydantic import ValidationError

from slimqwen.errors import SlimqwenError
from slimqwen.records import schemas
from slimqwen.records.record import Items, Measurements, Provenance, Record, ServedRecord, VersionedFile
from slimqwen.records.split import split_of
from slimqwen.text.files import CorpusError, read_json_lines
from slimqwen.workspace import locate

AnyRecord = TypeVar("AnyRecord", bound=Record)

_RESTORE = "restore it from git, or delete it"

_LISTED_ALONE: ContextVar[frozenset[str] | None] = ContextVar("listed alone", default=None)


class RecordError(SlimqwenError):
    """A record breaks its schema, cannot be read, or would overwrite another one."""


class RecordExistsError(RecordError):
    """A file with the record's name exists, and records are never overwritten."""


class MissingRecordError(SlimqwenError):
    """There is no record of a kind; the message names the command that makes one."""


@overload
def read_record(path: Path) -> Record: ...
@overload
def read_record(path: Path, kind: type[AnyRecord]) -> AnyRecord: ...
def read_record(path: Path, kind: type[Record] = Record) -> Record:
    """Read and validate one record.

    Args:
        kind: expected record kind; by default any.

    Raises:
        RecordError: the record cannot be read or is invalid; the message names file and fault.
    """
    record = validate(parse(path), short_path(path))
    if not isinstance(record, kind):
        expected = "a record" if kind is Record else f"a record of kind {kind.kind}"
        raise RecordError(f"{short_path(path)}: {record.schema_} is not {expected}; name another record")
    return record


def read_measurements(folder: Path) -> Measurements:
    """Read and validate a variant's measurements.json.

    Args:
        folder: experiments/<variant>.

    Raises:
        RecordError: the file cannot be read or is invalid; the message names file and fault.
    """
    path = folder / "measurements.json"
    if not path.is_file() and folder.parent.name == "experiments":
        path = locate(f"experiments/{folder.name}/measurements.json", folder.parents[1])
    claims = validate(parse(path), short_path(path))
    if not isinstance(claims, Measurements):
        raise RecordError(f"{short_path(path)}: a record of kind {claims.kind}, not measurements; {_RESTORE}")
    return claims


def read_items(path: Path) -> list[dict[str, Any]]:
    """Read the per-item results of a record, and check them against the digest in the record.

    Raises:
        RecordError: the record or its items are damaged or missing.
    """
    items = read_record(path).items
    if items is None:
        raise RecordError(f"{short_path(path)}: a record without items; measure again")
    items_path = path.with_name(items.file)
    try:
        content = items_path.read_bytes()
    except OSError as error:
        raise RecordError(
            f"{short_path(items_path)}: {error.strerror}; restore this file, which {path.name} needs"
        ) from error
    if hashlib.sha256(content).hexdigest() != items.sha256:
        raise RecordError(
            f"{short_path(items_path)}: not the items that {path.name} was computed from; {_RESTORE}"
        )
    try:
        return [item for _, item in read_json_lines(io.BytesIO(content), short_path(items_path))]
    except CorpusError as error:
        raise RecordError(f"{error}; {_RESTORE}") from None


def parse(path: Path) -> dict[str, Any]:
    """Parse the JSON object in a file, without validation.

    Raises:
        RecordError: the file cannot be read or holds no JSON object; the message names file and fault.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except FileNotFoundError:
        raise RecordError(
            f"{short_path(path)}: no such record; `slimqwen report` lists those that are there"
        ) from None
    except OSError as error:
        raise RecordError(
            f"{short_path(path)}: {error.strerror}; make it a file that this user can read"
        ) from error
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{short_path(path)}: not JSON ({error}); {_RESTORE}") from error
    if not isinstance(fields, dict):
        raise RecordError(f"{short_path(path)}: not a JSON object; {_RESTORE}")
    return fields


def validate(fields: Mapping[str, Any], location: str) -> VersionedFile:
    """Validate the fields of a record by the model of their schema.

    Args:
        fields: the fields as JSON.
        location: name of the record in messages.

    Raises:
        RecordError: the fields are invalid; the message names location, field and fault.
    """
    schema = fields.get("schema")
    kind = schema.partition("/")[0] if isinstance(schema, str) else ""
    models = schemas.models()
    if kind not in models:
        raise RecordError(
            f"{location}: unknown schema {schema!r}, this checkout knows {', '.join(models)}; update the checkout, or "
            "move the file elsewhere"
        )
    if schema != models[kind].present_schema():
        raise RecordError(
            f"{location}: schema {schema!r}, this checkout has {models[kind].present_schema()}; measure again, or "
            "check out the commit of the record"
        )
    if not issubclass(models[kind], Record) and (fault := schemas.find_fault(kind, fields)):
        raise RecordError(f"{location}: {fault}; correct it")
    try:
        # JSON can express half of a surrogate pair, which cannot be encoded in UTF-8.
        text = json.dumps(fields, ensure_ascii=False)
        record = models[kind].model_validate_json(text.encode(), strict=True)
    except UnicodeEncodeError as error:
        raise RecordError(f"{location}: a text that is not Unicode ({error}); measure again") from None
    except ValidationError as error:
        first = min(error.errors(), key=lambda fault: tuple(map(str, fault["loc"])))
        field = "/".join(map(str, first["loc"])) or "the record"
        cure = _RESTORE if issubclass(models[kind], Record) else "correct that field"
        raise RecordError(f"{location}: {field}: {first['msg']}; {cure}") from None
    if isinstance(record, ServedRecord) and record.items is None:
        raise RecordError(f"{location}: items: missing; measure again")
    return record


def write_record(folder: Path, record: Record, items: Iterable[Mapping[str, Any]] | None = None) -> Path:
    """Write a new record into a folder, the items before the record itself.

    Args:
        folder: experiments/<variant>; made if missing.
        record: the record, whose block `items` this function fills in.
        items: per-item results; None for a kind without items.

    Returns:
        Path of the record, whose name is its kind and the present time in UTC, to the second.

    Raises:
        RecordError: there is not a single item, a figure is not a number, or a record of this kind and second exists
            (nothing is written); or the folder is not writable (the record is kept in another folder, which the message
            names).
    """
    stem = f"{record.kind}_{_stamp()}"
    if items is None:
        path = folder / f"{stem}.json"
        _publish_together({path: serialise(record, short_path(path)).encode()})
        return path
    lines = [json.dumps(item, ensure_ascii=False, allow_nan=False, sort_keys=True) for item in items]
    content = "".join(f"{line}\n" for line in lines).encode()
    path, items_path = folder / f"{stem}.json", folder / f"{stem}.items.jsonl"
    if not lines:
        raise RecordError(f"{path.name}: the measurement gave no items; measure again")
    block = Items(file=items_path.name, sha256=hashlib.sha256(content).hexdigest(), count=len(lines))
    text = serialise(record.model_copy(update={"items": block}), path.name)
    _publish_together({items_path: content, path: text.encode()})
    return path


def _publish_together(files: Mapping[Path, bytes]) -> None:
    """Publish all files of a record or none; if the folder is not writable, keep them in another one."""
    published: list[Path] = []
    try:
        for path, content in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            publish(path, content)
            published.append(path)
    except BaseException as error:
        for path in published:
            path.unlink()
        if not isinstance(error, OSError):
            raise
        kept = Path(tempfile.mkdtemp(prefix="slimqwen-record-"))
        for path, content in files.items():
            (kept / path.name).write_bytes(content)
        raise RecordError(
            f"{path.parent} cannot be written ({error.strerror}), so the record is kept in {kept}; make the folder "
            "writable and move it there"
        ) from error


def serialise(record: Record, location: str) -> str:
    """The text of a record's file, after validation of its fields by its model.

    Args:
        location: name of the record in messages.

    Raises:
        RecordError: the record is invalid; the message names location and fault.
    """
    fields = record.as_json()
    validate(fields, location)
    return json.dumps(fields, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


@contextlib.contextmanager
def list_only(names: Iterable[str]) -> Iterator[None]:
    """Hide all other records from `records` for a `with` block.

    A generated table is made again with it from the records that the table names.

    Args:
        names: folder and file name of each record, such as tiny/quality_2026-01-01T000000Z.json.
    """
    token = _LISTED_ALONE.set(frozenset(names))
    try:
        yield
    finally:
        _LISTED_ALONE.reset(token)


def _newest_first(paths: Iterable[Path], kind: type[Record]) -> list[Path]:
    alone = _LISTED_ALONE.get()
    listed = (path for path in paths if alone is None or f"{path.parent.name}/{path.name}" in alone)
    return sorted((path for path in listed if not _has_other_version(path, kind)), reverse=True)


def _has_other_version(path: Path, kind: type[Record]) -> bool:
    """Whether a record, or its provenance, is in another version of its schema; a damaged record is for its reader."""
    try:
        fields = parse(path)
        versions = [str(part["schema"]) for part in (fields, fields["provenance"])]
    except (RecordError, KeyError, TypeError):
        return False
    present = [kind.present_schema(), Provenance.model_fields["schema_"].default]
    of_same_kinds = [each.partition("/")[0] for each in versions] == [
        each.partition("/")[0] for each in present
    ]
    return of_same_kinds and versions != present


def records(folder: Path, kind: type[Record]) -> list[Path]:
    """List the files of a kind's records in `folder`, experiments/<variant>, newest first.

    Records with another version of the schema are left out, so that a record of an older checkout hides no other.
    """
    return _newest_first(folder.glob(f"{kind.kind}_*.json"), kind)


def comparable(
    paths: Iterable[Path], kind: type[AnyRecord], condition: Callable[[AnyRecord], bool]
) -> Iterator[tuple[Path, AnyRecord]]:
    """Yield files and records that meet a condition, without records of a busy host or of one side of a split."""
    for path in paths:
        record = read_record(path, kind)
        if not record.provenance.host_was_busy and split_of(record) is None and condition(record):
            yield path, record


def latest(
    folder: Path, kind: type[AnyRecord], condition: Callable[[AnyRecord], bool] = lambda record: True
) -> Path:
    """Find the newest record of a kind in `folder`, experiments/<variant>, that meets a condition.

    Records of a busy host and of one side of the split are left out.

    Args:
        kind: the record kind.
        condition: whether a record may be used; by default any.

    Raises:
        MissingRecordError: there is none; the message names the command that makes one.
        RecordError: a newer record is damaged.
    """
    for path, _ in comparable(records(folder, kind), kind, condition):
        return path
    raise MissingRecordError(
        f"no {kind.kind} record that fits in {folder.parent.name}/{folder.name}{_cure(kind, folder.name)}"
    )


def _cure(kind: type[Record], variant: str) -> str:
    return f"; run `{kind.making_command(variant)}`" if kind.verb else ""


def publish(path: Path, content: bytes, *, replace: bool = False) -> None:
    """Write a file atomically; its folder must exist.

    Args:
        replace: whether an existing file is replaced.

    Raises:
        RecordError: the file exists and `replace` is False; it stays as it is.
    """
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        with contextlib.suppress(OSError):  # a file system may have no modes
            Path(temporary).chmod(0o644)  # mkstemp's mode 0600 would keep other users from reading the record
        if replace:
            Path(temporary).replace(path)
        else:
            _rename_to_new(Path(temporary), path)
    except FileExistsError:
        raise RecordExistsError(
            f"{short_path(path)} exists, and records are never overwritten; run the command again for a later record"
        ) from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            Path(temporary).unlink()


def _rename_to_new(temporary: Path, path: Path) -> None:
    """Rename a file; raises FileExistsError if `path` exists."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:
        # On a file system without hard links, such as exFAT or SMB, an exclusive create refuses an existing file.
        path.touch(exist_ok=False)
        temporary.replace(path)


def short_path(path: Path) -> str:
    """The last parts of a path: enough to find the file, and the same on every machine."""
    return "/".join(path.parts[-3:])


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def _stamp() -> str:
    return f"{datetime.now(UTC):%Y-%m-%dT%H%M%SZ}"
