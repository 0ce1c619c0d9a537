"""Checks of all records, and of the Markdown tables generated from them: one line per fault, with its cure.

`records.collection` reports files that cannot be read or that break their schema. This module compares items with their
digests, the checkpoints of cited records with those on this machine, generated tables with their records, and records
with those of an earlier commit. It also reports records in git that nothing cites, and faulty field reports.
"""

import hashlib
import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slimqwen import variant as variants
from slimqwen.errors import SlimqwenError
from slimqwen.records.collection import Collection, Problem, StoredRecord, collect
from slimqwen.records.git import run_git, tracked_files
from slimqwen.records.provenance import checkpoint_files
from slimqwen.records.record import Build, Record
from slimqwen.report import field, markdown

_RECORDS = (
    ":(glob)experiments/*/*_*.json",
    ":(glob)experiments/*/*.items.jsonl",
)
_LISTED_NAMES = 10
_MAIN_BRANCHES = ("origin/main", "origin/master")


@dataclass(frozen=True)
class CheckResult:
    """Result of `check_records`.

    Attributes:
        records: number of readable records.
        faults: faults, sorted by location.
        notes: sentences about what could not be checked on this machine, and records of another build of a checkpoint.
    """

    records: int
    faults: tuple[Problem, ...]
    notes: tuple[str, ...]


def check_records(root: Path, base: str | None = None) -> CheckResult:
    """Check all records of a repository and the tables made from them.

    Args:
        base: commit to compare records with; by default the one where this branch left the main branch, else the
            parent of HEAD.
    """
    collection = collect(root)
    faults = [*collection.problems]
    for entry in collection.records:
        faults += _item_faults(entry)
    checkpoint_faults, absent, builds = _checkpoint_faults(collection)
    history_faults, notes = _history_faults(root, base)
    faults += [*checkpoint_faults, *history_faults, *_table_faults(root), *_uncited_records(collection)]
    faults += field.read_reports(root)[1]
    if absent:
        names = ", ".join(absent[:_LISTED_NAMES])
        if len(absent) > _LISTED_NAMES:
            names += f" and {len(absent) - _LISTED_NAMES} others"
        notes = [f"Checkpoints not on this machine, so not checked: {names}.", *notes]
    notes = [*builds, *notes]
    ordered = sorted(dict.fromkeys(faults), key=lambda fault: (fault.location, fault.reason))
    return CheckResult(len(collection.records), tuple(ordered), tuple(notes))


def _item_faults(entry: StoredRecord[Record]) -> Iterator[Problem]:
    items = entry.record.items
    if items is None:
        return
    cure = f"restore committed items with `git checkout`, else delete {entry.path.name} and measure again"
    path = entry.path.with_name(items.file)
    location = f"{entry.location.rpartition('/')[0]}/{path.name}"
    if path.name != f"{entry.path.stem}.items.jsonl":
        reason = f"its items are in {path.name}, so this record was copied or renamed; restore the record's file name"
        yield Problem(entry.location, reason)
    try:
        content = path.read_bytes()
    except OSError as error:
        yield Problem(location, f"cannot be read: {error.strerror}; {cure}")
        return
    if hashlib.sha256(content).hexdigest() != items.sha256:
        yield Problem(location, f"these are not the items that {entry.path.name} was computed from; {cure}")
    elif content.count(b"\n") != items.count:
        yield Problem(location, f"has not the {items.count} items that {entry.path.name} states; {cure}")


def _checkpoint_faults(collection: Collection) -> tuple[list[Problem], list[str], list[str]]:
    """Compare the checkpoints of cited records with those on this machine.

    Returns:
        Faults of records of another recipe, variants whose checkpoint is not here, notes on records of another build.
    """
    faults, absent, notes = [], [], []
    for name, claims in collection.measurements.items():
        cited = set(claims.records)
        records = [
            entry for entry in collection.records if entry.variant == name and entry.path.name in cited
        ]
        if not records:
            continue
        try:
            weights = variants.load(name, collection.root).weights
            present = checkpoint_files(weights, collection.root) if weights.is_dir() else None
        except (SlimqwenError, OSError) as error:
            faults.append(
                Problem(f"experiments/{name}", f"its checkpoint is unreadable: {error}; fix that first")
            )
            continue
        if present is None:
            absent.append(name)
            continue
        builds: dict[Build, list[str]] = {}
        for entry in records:
            if (measured := entry.record.provenance.checkpoint) is None:
                continue
            build = measured.compare_build(present)
            builds.setdefault(build, []).append(entry.path.name)
            if build == "another recipe":
                faults.append(
                    Problem(
                        entry.location,
                        f"measured with checkpoint {measured.digest[:12]}, but {weights.name} is now "
                        f"{present.digest[:12]}; measure again, and cite the new record in "
                        f"experiments/{name}/measurements.json",
                    )
                )
        for build in ("another build", "unknown build"):
            if files := builds.get(build):
                article = "an " if build == "unknown build" else ""
                notes.append(f"Measured on {article}{build} of {name}: {', '.join(files)}.")
    return faults, absent, notes


def _table_faults(root: Path) -> Iterator[Problem]:
    """Faults of pages with tables; only a page that git does not track may be behind its records."""
    tracked = tracked_files(root, "*.md")
    for file in markdown.files(root):
        location = file.relative_to(root).as_posix()
        try:
            is_behind = markdown.render_tables(root, file) != file.read_text(encoding="utf-8")
            if is_behind and (tracked is None or location in tracked):
                yield Problem(location, "a table differs from its records; run `slimqwen report --tables`")
        except UnicodeDecodeError as error:
            yield Problem(location, f"not UTF-8 text ({error.reason}); save it as UTF-8")
        except SlimqwenError as error:
            reason = f"a table cannot be generated: {error}; repair that, then run `slimqwen report --tables`"
            yield Problem(location, reason)


def _history_faults(root: Path, base: str | None) -> tuple[list[Problem], list[str]]:
    """Faults of records that changed since a commit, except by a new schema version; and what was not checked."""
    try:
        commit = base or _base(root)
        words = run_git(
            root,
            "diff",
            "--no-renames",
            "--relative",
            "--name-only",
            "--diff-filter=MT",
            "-z",
            commit,
            "--",
            *_RECORDS,
        )
        changed = [location for location in words.split("\0") if location]
        faults = []
        for location in changed:
            before = run_git(root, "show", f"{commit}:./{location}")
            after = (root / location).read_text(encoding="utf-8")
            if _schema_names(before) == _schema_names(after):
                cure = f"restore it with `git checkout {commit[:10]} -- {location}`, because a new run is a new file"
                faults.append(
                    Problem(location, f"changed since {commit[:10]}, but records never change; {cure}")
                )
    except (OSError, UnicodeError, subprocess.CalledProcessError) as error:
        output = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        return [], [f"Changes of records not checked, because git failed: {output[0] if output else error}."]
    return faults, []


def _schema_names(text: str) -> tuple[str, str] | None:
    """The schemas of a record and of its provenance, each as kind/version; None if the text is no record."""
    try:
        content = json.loads(text)
        return content["schema"], content["provenance"]["schema"]
    except (ValueError, TypeError, KeyError):
        return None


def _uncited_records(collection: Collection) -> Iterator[Problem]:
    """Faults of records in git that no Markdown file, measurements.json or cited record names."""
    root = collection.root
    tracked = tracked_files(root, *_RECORDS)
    if tracked is None:
        return  # `_history_faults` says that git failed
    by_location = {entry.location: entry for entry in collection.records}
    pages = [(file, file.read_text(encoding="utf-8", errors="replace")) for file in markdown.files(root)]
    cited = {
        f"experiments/{name}/{record}"
        for name, claims in collection.measurements.items()
        for record in claims.records
    }
    for location, entry in by_location.items():
        for page, text in pages:
            names = (
                location.removeprefix("experiments/"),
                *([entry.path.name] if page.parent == entry.path.parent else []),
            )
            if any(name in text for name in names):
                cited.add(location)
    waiting = list(cited)
    while waiting:
        citing = by_location.get(waiting.pop())
        further = set(citing.record.cited()) - cited if citing else set()
        cited |= further
        waiting += further
    for location in sorted(tracked & by_location.keys() - cited):
        if by_location[location].record.looked_up:
            continue
        cure = "name it in a measurements.json or a Markdown page, or remove it with `git rm`"
        yield Problem(location, f"in git, but no table, measurements.json or Markdown page cites it; {cure}")


def _base(root: Path) -> str:
    """The commit where HEAD left the main branch; without one the parent of HEAD, else HEAD itself."""
    head = run_git(root, "rev-parse", "--verify", "HEAD").strip()
    for name in _MAIN_BRANCHES:
        try:
            fork = run_git(root, "merge-base", "HEAD", name).strip()
        except subprocess.CalledProcessError:
            continue
        if fork != head:
            return fork
    try:
        return run_git(root, "rev-parse", "--verify", "--quiet", "HEAD^").strip()
    except subprocess.CalledProcessError:
        return head
