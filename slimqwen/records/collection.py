"""Every record of a repository, read tolerantly: what cannot be used is named, and the rest is there.

Reading one record is the store's business and raises; a report over hundreds of them must not stop at the first
damaged file. What a person did to the files is told here in one line each; whether figures hold is for `checks`.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from types import MappingProxyType

from slimqwen.records import results, store, withdrawals

VARIANT_FILES = frozenset({"README.md", "config.env", "recipe.yaml", "measurements.json"})
"""What a folder of experiments/ holds beside records and their items."""

_OF_NO_VARIANT = ""


@dataclass(frozen=True)
class Found:
    """One readable record.

    Attributes:
        path: of its file.
        place: the path from the repository's root.
        kind: of its schema, such as quality or start_up.
        variant: that it is of; empty for the few explorations that are of none.
        record: in the present version of its schema.
    """

    path: Path
    place: str
    kind: str
    variant: str
    record: store.Record


@dataclass(frozen=True)
class Problem:
    """One file that was left out, or that is missing, and why in one line."""

    place: str
    reason: str


@dataclass(frozen=True)
class Collection:
    """What `collect` found.

    Attributes:
        root: the repository.
        records: by variant and kind, newest first.
        measurements: each variant's measurements.json.
        problems: by place.
    """

    root: Path
    records: tuple[Found, ...]
    measurements: Mapping[str, store.Record]
    problems: tuple[Problem, ...]

    def of(self, variant: str, kind: str) -> Sequence[Found]:
        """The records of a variant and kind, newest first."""
        return self._groups.get((variant, kind), ())

    def of_kind(self, kind: str) -> Sequence[Found]:
        """The records of a kind, of whatever variant."""
        return tuple(one for one in self.records if one.kind == kind)

    @cached_property
    def _groups(self) -> Mapping[tuple[str, str], Sequence[Found]]:
        return {key: tuple(group) for key, group in groupby(self.records, _group)}


@dataclass
class _Gathering:
    """What has been found so far."""

    root: Path
    records: list[Found] = field(default_factory=list)
    measurements: dict[str, store.Record] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)

    def place(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def leave_out(self, path: Path, reason: str) -> None:
        self.problems.setdefault(self.place(path), " ".join(reason.split()))

    def read(self, path: Path) -> store.Record | None:
        """A valid record; None, and the reason noted, for anything else."""
        if path.is_symlink() or not path.is_file():
            self.leave_out(path, "not a plain file; put the record itself there")
            return None
        try:
            return store.read(path)
        except store.RecordError as error:
            self.leave_out(path, str(error).removeprefix(f"{store.place(path)}: "))
            return None


def collect(root: Path) -> Collection:
    """Read all records of experiments/ and results/.

    Damaged, missing, foreign and dangling files become problems; nothing raises. The items are looked for, not read:
    `store.read_items` holds them against their digest when they are needed, and `checks` does it for all.

    Args:
        root: the repository.
    """
    found = _Gathering(root)
    variants = set()
    for path in _files(found, root / "experiments", deep=False):
        found.leave_out(path, "belongs to no variant; move it into the folder of one")
    for folder in _folders(root / "experiments"):
        files = sorted(_files(found, folder))
        if not (folder / "config.env").is_file():
            found.leave_out(
                folder,
                f"no config.env, so no variant: its {len(files)} files are left out; add one, or move them away",
            )
            continue
        variants.add(folder.name)
        _read_variant(found, folder, files)
    _read_results(found, root / "results", variants)
    _require_baselines(found, variants)
    _miss_cited(found)
    records = sorted(found.records, key=lambda one: (_written(one), one.place), reverse=True)
    return Collection(
        root,
        tuple(sorted(records, key=_group)),
        MappingProxyType(dict(sorted(found.measurements.items()))),
        tuple(Problem(place, reason) for place, reason in sorted(found.problems.items())),
    )


def cited(record: store.Record, variant: str) -> Iterator[str]:
    """The places of the records that a measurements.json or a gate record rests on."""
    for name in record.get("records", ()):
        yield f"experiments/{name}" if "/" in name else f"experiments/{variant}/{name}"


def _group(found: Found) -> tuple[str, str]:
    return found.variant, found.kind


def _written(found: Found) -> str:
    return str(found.record["provenance"]["ended"])


def _folders(parent: Path) -> list[Path]:
    try:
        return sorted(path for path in parent.iterdir() if path.is_dir())
    except OSError:
        return []


def _files(found: _Gathering, folder: Path, *, deep: bool = True) -> Iterator[Path]:
    """All files below a folder; folders that cannot be read are problems."""

    def refused(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            found.leave_out(Path(error.filename), f"{error.strerror}; make it readable")

    for place, folders, names in os.walk(folder, onerror=refused):
        yield from (Path(place, name) for name in names)
        if not deep:
            folders.clear()


def _read_variant(found: _Gathering, folder: Path, files: Iterable[Path]) -> None:
    wanted = set()
    others = []
    measurements = folder / "measurements.json"
    for path in files:
        name = path.name
        if path.parent != folder:
            found.leave_out(path, "belongs to nobody: a variant's folder holds no folders")
        elif name == measurements.name or name in VARIANT_FILES:
            continue
        elif _is_unfinished(path):
            found.leave_out(path, "left by a run that was cut off; delete it")
        elif path.suffix != ".json":
            others.append(path)
        else:
            # Items and a plot beside a record that is left out are not dangling.
            wanted |= {f"{path.stem}.items.jsonl", f"{path.stem}.svg"}
            record = found.read(path)
            if record is not None and _belongs(found, path, record, folder.name):
                items = path.with_name(record["items"]["file"])
                wanted.add(items.name)
                _keep(found, path, record, folder.name, needs=[items])
    for path in others:
        if path.name not in wanted:
            kind = "items without their record" if path.name.endswith(".items.jsonl") else "belongs to nobody"
            found.leave_out(path, f"{kind}; restore what it belongs to, or delete it")
    record = found.read(measurements) if measurements.exists() else None
    if record is not None and _kind(record) != "measurements":
        found.leave_out(measurements, f"holds a record of kind {_kind(record)}, not what the variant claims")
    elif record is not None:
        found.measurements[folder.name] = record
    elif not measurements.exists():
        found.leave_out(measurements, "missing; write one with the variant's hypothesis and baseline")


def _read_results(found: _Gathering, folder: Path, variants: set[str]) -> None:
    stems = set()
    others = []
    for path in sorted(_files(found, folder)):
        if _is_unfinished(path):
            found.leave_out(path, "left by a run that was cut off; delete it")
            continue
        if path == found.root / withdrawals.PLACE:
            continue
        if path.suffix != ".json":
            others.append(path)
            continue
        stems.add(path.with_suffix(""))
        record = found.read(path)
        if record is None:
            continue
        variant = record.get("variant", _OF_NO_VARIANT)
        kind = _kind(record)
        if "provenance" not in record or "items" in record:
            found.leave_out(path, f"a record of kind {kind}: its place is experiments/, not results/")
        elif path != folder / f"{results.stem(record)}.json":
            found.leave_out(
                path,
                f"holds {kind} of {variant or 'no variant'}, which its name does not say; "
                f"name it results/{results.stem(record)}.json",
            )
        elif variant and variant not in variants:
            found.leave_out(path, f"of variant {variant!r}, which experiments/ does not have")
        else:
            _keep(found, path, record, variant, needs=[])
    for path in others:
        if path.with_suffix("") not in stems:
            found.leave_out(path, "belongs to nobody; restore the record that it is of, or delete it")


def _belongs(found: _Gathering, path: Path, record: store.Record, variant: str) -> bool:
    kind = _kind(record)
    if not path.name.startswith(f"{kind}_") or "items" not in record:
        found.leave_out(path, f"holds a record of kind {kind}, which its name or its folder does not say")
    elif record["variant"] != variant:
        found.leave_out(
            path,
            f"is of {record['variant']}, in the folder of {variant}; move it to experiments/{record['variant']}/",
        )
    else:
        return True
    return False


def _keep(found: _Gathering, path: Path, record: store.Record, variant: str, needs: Iterable[Path]) -> None:
    missing = [need.name for need in needs if not need.is_file()]
    if missing:
        found.leave_out(path, f"its items {missing[0]} are missing; `git checkout` restores committed ones")
    else:
        found.records.append(Found(path, found.place(path), _kind(record), variant, record))


def _require_baselines(found: _Gathering, variants: set[str]) -> None:
    """Leave out claims against a baseline that is not there."""
    for name, record in list(found.measurements.items()):
        baseline = record["baseline"]
        if baseline is not None and (baseline == name or baseline not in variants):
            del found.measurements[name]
            wrong = "is itself" if baseline == name else f"{baseline!r} is no variant of experiments/"
            found.leave_out(
                found.root / "experiments" / name / "measurements.json",
                f"its baseline {wrong}; name one that is there, or null",
            )


def _miss_cited(found: _Gathering) -> None:
    """Name the records that others rest on and that are not there."""
    citing = [
        (name, f"experiments/{name}/measurements.json", found.measurements[name])
        for name in found.measurements
    ]
    citing += [(one.variant, one.place, one.record) for one in found.records if one.kind == "gate"]
    for variant, place, record in citing:
        for needed in cited(record, variant):
            if not (found.root / needed).is_file():
                found.leave_out(
                    found.root / needed, f"missing, and {place} rests on it; restore it, or cite it no more"
                )


def _kind(record: store.Record) -> str:
    return str(record["schema"]).partition("/")[0]


def _is_unfinished(path: Path) -> bool:
    """Whether it is what the store writes under a temporary name."""
    return path.name.startswith(".")
