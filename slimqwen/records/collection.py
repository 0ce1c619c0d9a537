"""Collects all records of a repository: the readable ones, and the unusable files with the reason.

`store.read_record` raises on a bad record; a report over hundreds of records must not stop at the first damaged file.
`report.checks` compares records with schemas, items and checkpoints.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from slimqwen.records import store
from slimqwen.records.record import Measurements, Record, VersionedFile
from slimqwen.records.split import Split, split_of
from slimqwen.variant import local_names, names
from slimqwen.workspace import is_shipped, locate, relative

_VARIANT_FILES = frozenset({"README.md", "config.env", "recipe.yaml", "measurements.json"})
"""Other files than records and items that a folder of experiments/ may have."""

AnyRecord = TypeVar("AnyRecord", bound=Record, covariant=True)


@dataclass(frozen=True)
class StoredRecord(Generic[AnyRecord]):
    """One readable record.

    Attributes:
        path: file of the record.
        location: path relative to the repository.
        record: the record, in the present version of its schema.
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
        """Name of the variant that was measured; empty if the record is of no variant."""
        return self.record.variant

    @property
    def ended(self) -> str:
        """Time at which the measurement ended, UTC to the second."""
        return self.record.provenance.ended


@dataclass(frozen=True)
class Problem:
    """One file that is faulty or missing; faulty files are left out of a collection.

    Attributes:
        location: path relative to the repository.
        reason: one line: the fault, `; `, and the cure.
    """

    location: str
    reason: str

    @property
    def fault(self) -> str:
        """The fault without the cure."""
        return self.reason.rpartition("; ")[0] or self.reason

    @property
    def cure(self) -> str:
        """The cure without the fault."""
        fault, _, cure = self.reason.rpartition("; ")
        return cure if fault else "restore the committed file, or delete it"


@dataclass(frozen=True)
class Collection:
    """The records of a repository.

    Attributes:
        records: readable records, sorted by variant and kind, newest first.
        measurements: contents of measurements.json, by variant.
        problems: faulty and missing files, sorted by location.
    """

    root: Path
    records: tuple[StoredRecord[Record], ...]
    measurements: Mapping[str, Measurements]
    problems: tuple[Problem, ...]

    def select(
        self, kind: type[AnyRecord], variant: str | None = None, split: Split | None = None
    ) -> Sequence[StoredRecord[AnyRecord]]:
        """Select the records of a kind, except those of a busy host; each variant's records are newest first.

        Args:
            variant: name of a variant; None for all variants.
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


def collect(root: Path, demo: str = "") -> Collection:
    """Read all records of experiments/, but not their items.

    Damaged, missing and misplaced files become problems; nothing raises.

    Args:
        demo: folder of further records, with a folder for each variant; damaged ones are left out without a problem.
    """
    reader = _Reader(root, frozenset(local_names(root)))
    for path in reader.list_files("experiments"):
        reader.read_experiment(path)
    for path in sorted((root / demo).glob("*/*.json")) if demo else ():
        reader.read_further(path)
    for name in sorted(reader.variants):
        reader.read_claims(name)
    reader.require_cited()
    records = sorted(reader.records, key=lambda entry: (entry.ended, entry.location), reverse=True)
    return Collection(
        root,
        tuple(sorted(records, key=_group)),
        MappingProxyType(reader.measurements),
        tuple(Problem(location, reason) for location, reason in sorted(reader.problems.items())),
    )


@dataclass
class _Reader:
    """State of `collect`: the records and problems that it has found so far."""

    root: Path
    variants: Set[str]
    records: list[StoredRecord[Record]] = field(default_factory=list)
    measurements: dict[str, Measurements] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)

    def location(self, path: Path) -> str:
        return relative(path, self.root).as_posix()

    def leave_out(self, path: Path, reason: str) -> None:
        self.problems.setdefault(self.location(path), " ".join(reason.split()))

    def list_files(self, folder: str) -> Iterator[Path]:
        """Yield all files below a folder of the repository; folders that cannot be read become problems."""

        def note(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):
                self.leave_out(Path(error.filename), f"{error.strerror}; make the folder readable")

        for parent, _, files in os.walk(self.root / folder, onerror=note):
            yield from (Path(parent, name) for name in sorted(files))

    def read_experiment(self, path: Path) -> None:
        """Read a file below experiments/."""
        variant, *rest = path.relative_to(self.root / "experiments").parts
        if not rest:
            if variant != ".gitkeep":
                self.leave_out(path, "belongs to no variant; move it into the folder of a variant")
        elif variant not in self.variants:
            folder = self.root / "experiments" / variant
            self.leave_out(folder, "no config.env, so this is no variant; add config.env, or move the files")
        elif len(rest) > 1:
            self.leave_out(path, "in a subfolder, but a variant's folder must have none; move the file")
        elif path.name not in _VARIANT_FILES:
            self.read_file(path)

    def read_file(self, path: Path) -> None:
        """Read a record, or check that another file may be beside records."""
        if path.name.startswith("."):
            self.leave_out(path, "left by an interrupted run; delete it")  # the store's temporary name
        elif path.suffix != ".json":
            owner = f"{path.name.removesuffix('.items.jsonl').removesuffix('.svg')}.json"
            if not os.path.lexists(path.with_name(owner)):
                self.leave_out(path, "belongs to no record; restore the record, or delete this file")
        elif isinstance(record := self.parse(path), Record):
            if fault := self.misplacement(path, record):
                self.leave_out(path, fault)
            elif record.items and not path.with_name(record.items.file).is_file():
                self.leave_out(
                    path,
                    f"its items {record.items.file} are missing; restore committed ones with `git checkout`",
                )
            else:
                self.records.append(StoredRecord(path, self.location(path), record))

    def read_further(self, path: Path) -> None:
        """Read a record of another folder than experiments/; one that cannot be used is passed over."""
        try:
            record = store.validate(store.parse(path), store.short_path(path))
        except store.RecordError:
            return
        if not isinstance(record, Record) or record.variant not in self.variants:
            return
        if record.items is None or path.with_name(record.items.file).is_file():
            self.records.append(StoredRecord(path, self.location(path), record))

    def parse(self, path: Path) -> VersionedFile | None:
        """Read and validate a record; returns None if that fails, and adds the fault to the problems."""
        if path.is_symlink() or not path.is_file():
            self.leave_out(path, "not a plain file; replace it by the record itself")
            return None
        try:
            return store.validate(store.parse(path), store.short_path(path))
        except store.RecordError as error:
            self.leave_out(path, str(error).removeprefix(f"{store.short_path(path)}: "))
            return None

    def misplacement(self, path: Path, record: Record) -> str:
        """Fault of a record's file name or folder, with the cure; empty if there is none."""
        if record.variant not in self.variants:
            return f"of variant {record.variant!r}, which experiments/ does not have"
        suffix = path.name.removeprefix(f"{record.kind}_")
        right = self.root / "experiments" / record.variant / f"{record.kind}_{suffix}"
        if path == right:
            return ""
        return (
            f"holds {record.kind} of {record.variant}, which its name or its folder does not say; "
            f"move it to {self.location(right)}"
        )

    def read_claims(self, variant: str) -> None:
        """Read a variant's measurements.json."""
        path = locate(f"experiments/{variant}/measurements.json", self.root)
        if not path.exists():
            self.leave_out(
                path,
                "missing; write it with the variant's hypothesis and baseline, as `slimqwen variant new` does",
            )
            return
        claims = self.parse(path)
        if claims is None:
            return
        if not isinstance(claims, Measurements):
            self.leave_out(path, f"holds a record of kind {claims.kind}, not measurements")
        elif claims.baseline == variant:
            self.leave_out(path, "its baseline is itself; name an existing variant, or null")
        elif claims.baseline not in (None, *names(self.root)):
            self.leave_out(
                path,
                f"its baseline {claims.baseline!r} is no variant of experiments/; name an existing variant, or null",
            )
        elif is_shipped(path, self.root):  # with what was measured elsewhere: its records are not here
            self.measurements[variant] = claims.model_copy(update={"records": ()})
        else:
            self.measurements[variant] = claims

    def require_cited(self) -> None:
        """Add a problem for each record that is cited but missing."""
        citations = {entry.location: entry.record.cited() for entry in self.records}
        for variant, claims in self.measurements.items():
            folder = f"experiments/{variant}"
            citations[f"{folder}/measurements.json"] = [f"{folder}/{name}" for name in claims.records]
        for location, cited in citations.items():
            for name in cited:
                path = self.root / name
                if not path.is_file():
                    self.leave_out(
                        path, f"missing, but {location} cites it; restore the file, or remove the citation"
                    )


def _group(entry: StoredRecord[Record]) -> tuple[str, str]:
    return entry.variant, entry.kind
