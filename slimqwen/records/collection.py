"""All records of a repository: the readable ones, and the unusable files with the reason.

`store.read_record` raises on a bad record; a report over hundreds of records must not stop at the first damaged file.
`report.checks` compares records with schemas, items and checkpoints.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from slimqwen.records import store
from slimqwen.records.record import Measurements, Record
from slimqwen.records.split import Split, split_of

_EXPLORATIONS = "explorations"
"""Folder of results/ with the figures of scripts/, which are no records."""

_VARIANT_FILES = frozenset({"README.md", "config.env", "recipe.yaml", "measurements.json"})
"""Files of a folder of experiments/ that are neither records nor their items."""

AnyRecord = TypeVar("AnyRecord", bound=Record, covariant=True)


@dataclass(frozen=True)
class StoredRecord(Generic[AnyRecord]):
    """One readable record.

    Attributes:
        location: path from the repository's root.
        record: in the present version of its schema.
    """

    path: Path
    location: str
    record: AnyRecord

    @property
    def kind(self) -> str:
        """Kind of the record, such as quality or start_up."""
        return self.record.kind

    @property
    def variant(self) -> str:
        """The variant that was measured; empty for a record of no variant."""
        return self.record.variant

    @property
    def ended(self) -> str:
        """When the measurement ended, UTC to the second."""
        return self.record.provenance.ended


@dataclass(frozen=True)
class Problem:
    """One file that was left out, that is missing, or that is at fault.

    Attributes:
        location: path from the repository's root.
        reason: the fault, then `; ` and the cure, on one line.
    """

    location: str
    reason: str

    @property
    def fault(self) -> str:
        """What is wrong."""
        return self.reason.rpartition("; ")[0] or self.reason

    @property
    def cure(self) -> str:
        """What to do."""
        fault, _, cure = self.reason.rpartition("; ")
        return cure if fault else "restore the committed file, or delete it"


@dataclass(frozen=True)
class Collection:
    """The records of a repository.

    Attributes:
        records: by variant and kind, newest first.
        measurements: each variant's measurements.json, by variant.
        problems: files that were left out, by location.
    """

    root: Path
    records: tuple[StoredRecord[Record], ...]
    measurements: Mapping[str, Measurements]
    problems: tuple[Problem, ...]

    def select(
        self, kind: type[AnyRecord], variant: str | None = None, split: Split | None = None
    ) -> Sequence[StoredRecord[AnyRecord]]:
        """The records of a kind without those of a busy host; records of one variant are newest first.

        Args:
            variant: its name; None for all variants.
            split: side of the split that was measured; None for records of all items.
        """
        entries: Iterable[StoredRecord[Any]] = (
            self._quiet_records if variant is None else self._groups.get((variant, kind.kind), ())
        )
        return tuple(
            entry for entry in entries if entry.kind == kind.kind and split_of(entry.record) == split
        )

    @cached_property
    def _groups(self) -> Mapping[tuple[str, str], Sequence[StoredRecord[Record]]]:
        return {key: tuple(group) for key, group in groupby(self._quiet_records, _group)}

    @cached_property
    def _quiet_records(self) -> Sequence[StoredRecord[Record]]:
        return [entry for entry in self.records if not entry.record.provenance.host_was_busy]


def collect(root: Path) -> Collection:
    """Read all records of experiments/ and results/.

    Damaged, missing, foreign and dangling files become problems; nothing raises. Items are not read.
    """
    reader = _Reader(root)
    variants = set()
    for path in reader.files(root / "experiments", deep=False):
        reader.leave_out(path, "belongs to no variant; move it into a variant's folder")
    for folder in _folders(root / "experiments"):
        files = sorted(reader.files(folder))
        if (folder / "config.env").is_file():
            variants.add(folder.name)
            _read_variant(reader, folder, files)
        else:
            reader.leave_out(
                folder,
                f"no config.env, so no variant: its {len(files)} files are left out; add config.env, or move the files",
            )
    _read_results(reader, root / "results", variants)
    _require_baselines(reader, variants)
    _require_cited(reader)
    records = sorted(reader.records, key=lambda entry: (entry.ended, entry.location), reverse=True)
    return Collection(
        root,
        tuple(sorted(records, key=_group)),
        MappingProxyType(dict(sorted(reader.measurements.items()))),
        tuple(Problem(location, reason) for location, reason in sorted(reader.problems.items())),
    )


@dataclass
class _Reader:
    """Records and problems so far."""

    root: Path
    records: list[StoredRecord[Record]] = field(default_factory=list)
    measurements: dict[str, Measurements] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)

    def location(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def leave_out(self, path: Path, reason: str) -> None:
        self.problems.setdefault(self.location(path), " ".join(reason.split()))

    def read(self, path: Path) -> Record | Measurements | None:
        """A valid record; None for a bad one, whose fault becomes a problem."""
        if path.is_symlink() or not path.is_file():
            self.leave_out(path, "not a plain file; put the record itself there")
            return None
        try:
            return store.validate(store.parse(path), store.short_path(path))
        except store.RecordError as error:
            self.leave_out(path, str(error).removeprefix(f"{store.short_path(path)}: "))
            return None

    def files(self, folder: Path, *, deep: bool = True) -> Iterator[Path]:
        """All files below a folder; folders that cannot be read are problems."""

        def note(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):
                self.leave_out(Path(error.filename), f"{error.strerror}; make it readable")

        for parent, folders, names in os.walk(folder, onerror=note):
            yield from (Path(parent, name) for name in names)
            if not deep:
                folders.clear()

    def add(self, path: Path, record: Record) -> None:
        self.records.append(StoredRecord(path, self.location(path), record))


def _read_variant(reader: _Reader, folder: Path, files: Iterable[Path]) -> None:
    expected = set()
    others = []
    for path in files:
        if path.parent != folder:
            reader.leave_out(path, "in a subfolder, which no variant has; move it away")
        elif path.name in _VARIANT_FILES:
            continue
        elif _is_unfinished(path):
            reader.leave_out(path, "left by an interrupted run; delete it")
        elif path.suffix != ".json":
            others.append(path)
        else:
            # Items and a plot beside a record that is left out are not dangling.
            expected |= {f"{path.stem}.items.jsonl", f"{path.stem}.svg"}
            record = reader.read(path)
            if record is not None:
                expected.add(_add_of_variant(reader, path, record, folder.name))
    for path in others:
        if path.name not in expected:
            fault = (
                "items without their record" if path.name.endswith(".items.jsonl") else "belongs to no record"
            )
            reader.leave_out(path, f"{fault}; restore the record, or delete this file")
    _read_measurements(reader, folder)


def _add_of_variant(reader: _Reader, path: Path, record: Record | Measurements, variant: str) -> str:
    """Add a record, or say why not; returns the name of its items."""
    items = "" if isinstance(record, Measurements) or record.items is None else record.items.file
    if isinstance(record, Measurements) or not items or not path.name.startswith(f"{record.kind}_"):
        reader.leave_out(
            path, f"holds a record of kind {record.kind}, which its name or its folder does not say"
        )
    elif record.variant != variant:
        owner = record.variant
        reader.leave_out(path, f"is of {owner}, in the folder of {variant}; move it to experiments/{owner}/")
    elif not path.with_name(items).is_file():
        reader.leave_out(path, f"its items {items} are missing; `git checkout` restores committed ones")
    else:
        reader.add(path, record)
    return items


def _read_measurements(reader: _Reader, folder: Path) -> None:
    path = folder / "measurements.json"
    if not path.exists():
        reader.leave_out(path, "missing; write one with the variant's hypothesis and baseline")
        return
    claims = reader.read(path)
    if isinstance(claims, Measurements):
        reader.measurements[folder.name] = claims
    elif claims is not None:
        reader.leave_out(path, f"holds a record of kind {claims.kind}, not measurements")


def _read_results(reader: _Reader, folder: Path, variants: set[str]) -> None:
    stems = set()
    others = []
    for path in sorted(reader.files(folder)):
        if _is_unfinished(path):
            reader.leave_out(path, "left by an interrupted run; delete it")
        elif path.parent == folder / _EXPLORATIONS:
            continue
        elif path.suffix != ".json":
            others.append(path)
        else:
            stems.add(path.with_suffix(""))
            record = reader.read(path)
            if record is not None:
                _add_result(reader, folder, path, record, variants)
    for path in others:
        if path.with_suffix("") not in stems:
            reader.leave_out(path, "belongs to no record; restore the record, or delete this file")


def _add_result(
    reader: _Reader, folder: Path, path: Path, record: Record | Measurements, variants: set[str]
) -> None:
    if isinstance(record, Measurements) or record.folder != "results":
        reader.leave_out(path, f"a record of kind {record.kind}: it belongs to experiments/, not results/")
    elif path != folder / f"{store.result_stem(record)}.json":
        reader.leave_out(
            path,
            f"holds {record.kind} of {record.variant or 'no variant'}, which its name does not say; "
            f"name it results/{store.result_stem(record)}.json",
        )
    elif record.variant and record.variant not in variants:
        reader.leave_out(path, f"of variant {record.variant!r}, which experiments/ does not have")
    else:
        reader.add(path, record)


def _require_baselines(reader: _Reader, variants: set[str]) -> None:
    """Leave out the measurements.json of variants whose baseline does not exist."""
    for name, claims in list(reader.measurements.items()):
        baseline = claims.baseline
        if baseline is not None and (baseline == name or baseline not in variants):
            del reader.measurements[name]
            fault = "is itself" if baseline == name else f"{baseline!r} is no variant of experiments/"
            reader.leave_out(
                reader.root / "experiments" / name / "measurements.json",
                f"its baseline {fault}; name an existing variant, or null",
            )


def _require_cited(reader: _Reader) -> None:
    """Report cited records that are missing."""
    citations = {entry.location: entry.record.cited() for entry in reader.records}
    for variant, claims in reader.measurements.items():
        folder = f"experiments/{variant}"
        citations[f"{folder}/measurements.json"] = [f"{folder}/{name}" for name in claims.records]
    for location, names in citations.items():
        for name in names:
            path = reader.root / name
            if not path.is_file():
                reader.leave_out(
                    path, f"missing, but {location} cites it; restore the file, or remove the citation"
                )


def _group(entry: StoredRecord[Record]) -> tuple[str, str]:
    return entry.variant, entry.kind


def _folders(parent: Path) -> list[Path]:
    try:
        return sorted(path for path in parent.iterdir() if path.is_dir())
    except OSError:
        return []


def _is_unfinished(path: Path) -> bool:
    """Whether the store wrote the file under a temporary name."""
    return path.name.startswith(".")
