"""Whether the records, and what is written from them, can be trusted: every fault by name, with its cure.

`collect` says what can be read; here each file is held against its neighbours: items against their digest, citations
against the checkpoint that is there, README tables and prose against the records, and all of it against git.
"""

import hashlib
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from slimqwen import checkpoint
from slimqwen import variant as variants
from slimqwen.errors import SlimqwenError
from slimqwen.records import withdrawals
from slimqwen.records.collection import Collection, Found, collect
from slimqwen.report import claims, tables

_RECORDS = (
    ":(glob)experiments/*/*_*.json",
    ":(glob)experiments/*/*.items.jsonl",
    # Before they had a time in their names, explorations replaced each other.
    ":(glob)results/*_????-??-??T??????Z.json",
)
_TOLD = 10  # names in a sentence


@dataclass(frozen=True)
class Fault:
    """What is wrong with a file, and what to do; `place` is its path from the repository's root."""

    place: str
    wrong: str
    cure: str


@dataclass(frozen=True)
class Checked:
    """What `check` found.

    Attributes:
        records: how many were read and are sound, but for their faults.
        faults: by place.
        notes: sentences on what could not be checked here; no faults.
    """

    records: int
    faults: tuple[Fault, ...]
    notes: tuple[str, ...]


def check(root: Path) -> Checked:
    """Hold all records of a repository, and what its READMEs say of them, against each other.

    Args:
        root: the repository.
    """
    collection = collect(root)
    faults = [Fault(one.place, *_parted(one.reason)) for one in collection.problems]
    notes: list[str] = []
    for one in collection.records:
        faults += _of_items(one)
    for checks in (_of_checkpoints, _of_history):
        more_faults, more_notes = checks(collection)
        faults += more_faults
        notes += more_notes
    faults += _of_readmes(collection)
    ordered = sorted(dict.fromkeys(faults), key=lambda fault: (fault.place, fault.wrong))
    return Checked(len(collection.records), tuple(ordered), tuple(notes))


def _parted(reason: str) -> tuple[str, str]:
    """A reason as `collect` gives it -> what is wrong, and the cure where it names one."""
    wrong, _, cure = reason.rpartition("; ")
    return (wrong, cure) if wrong else (reason, "restore what git has, or take it away")


def _of_items(found: Found) -> Iterator[Fault]:
    described = found.record.get("items")
    if described is None:
        return
    again = f"`git checkout` restores committed ones; else delete {found.path.name} and measure again"
    path = found.path.with_name(described["file"])
    place = f"{found.place.rpartition('/')[0]}/{path.name}"
    if path.name != f"{found.path.stem}.items.jsonl":
        yield Fault(
            found.place, f"its items are {path.name}: copied or renamed", "give the file its name again"
        )
    try:
        content = path.read_bytes()
    except OSError as error:
        yield Fault(place, f"cannot be read: {error.strerror}", again)
        return
    if hashlib.sha256(content).hexdigest() != described["sha256"]:
        yield Fault(place, f"not the items that {found.path.name} was computed from", again)
    elif content.count(b"\n") != described["count"]:
        yield Fault(place, f"not the {described['count']} items that {found.path.name} counts", again)


def _of_checkpoints(collection: Collection) -> tuple[list[Fault], list[str]]:
    """What measurements.json cites against the checkpoint that is there now."""
    faults, absent = [], []
    for name, claims_of in collection.measurements.items():
        cited = set(claims_of["records"])
        records = [one for one in collection.records if one.variant == name and one.path.name in cited]
        if not records:
            continue
        try:
            weights = variants.load(name, collection.root).weights
            present = checkpoint.digest(weights) if weights.is_dir() else None
        except (SlimqwenError, OSError) as error:
            faults.append(
                Fault(f"experiments/{name}", f"its checkpoint cannot be told: {error}", "mend that first")
            )
            continue
        if present is None:
            absent.append(name)
            continue
        faults += [
            Fault(
                one.place,
                f"of checkpoint {digest[:12]}, while {weights.name} is {present[:12]} now",
                f"measure again; take it out of experiments/{name}/measurements.json, it stays as it is",
            )
            for one in records
            if (digest := one.record["provenance"]["checkpoint"]["digest"]) != present
        ]
    if not absent:
        return faults, []
    told = ", ".join(absent[:_TOLD]) + (f" and {len(absent) - _TOLD} others" if len(absent) > _TOLD else "")
    return faults, [f"Checkpoints not checked, for their weights are not on this machine: {told}."]


def _of_readmes(collection: Collection) -> Iterator[Fault]:
    """Generated tables and the figures between them."""
    ratios: list[claims.Ratio] | None = None
    for file in tables.markdown_files(collection.root):
        place = file.relative_to(collection.root).as_posix()
        try:
            text = file.read_text(encoding="utf-8")
            fresh = tables.rewrite(
                text, lambda name, words: tables.build_markdown(collection.root, name, words)
            )
        except UnicodeDecodeError as error:
            yield Fault(place, f"not UTF-8 text ({error.reason})", "write it anew")
            continue
        except SlimqwenError as error:
            yield Fault(place, f"a table cannot be generated: {error}", "mend that, then `make tables`")
            continue
        if fresh != text:
            yield Fault(place, "a table differs from what its records generate", "`make tables`")
        if file.name != "README.md":
            continue
        found = claims.find(text)
        if found and ratios is None:
            ratios = claims.measured(collection)
        owner = None if file.parent == collection.root else file.parent.name
        for claim in found:
            if wrong := claims.refute(claim, ratios or [], owner):
                yield Fault(
                    f"{place}:{claim.line}",
                    wrong,
                    "write what one joint measurement gives, or (reference) where others published it",
                )


def _of_history(collection: Collection) -> tuple[list[Fault], list[str]]:
    """Append-only: what git has of records against what was first committed and what is there now."""
    root = collection.root
    try:
        _git(root, "rev-parse", "--verify", "HEAD")
        changed = _git(
            root, "diff", "--no-renames", "--relative", "--name-status", "-z", "HEAD", "--", *_RECORDS
        )
        committed = _originals(root)
        present = {
            name: facts.split()[2]
            for facts, _, name in (
                line.partition("\t") for line in _git(root, "ls-tree", "-rz", "HEAD").split("\0")
            )
            if name
        }
        cut = _git(root, "rev-parse", "--is-shallow-repository").strip() == "true"
    except (OSError, subprocess.CalledProcessError) as error:
        said = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        return [], [f"History not checked, for git cannot be asked: {said[0] if said else error}."]
    withdrawn, faults, notes = _withdrawn(root, None if cut else committed)
    for status, place in _pairs(changed):
        if status == "D" and withdrawals.record_of(place) in withdrawn:
            continue
        if status in "MDT":
            wrong = "gone, and git has it" if status == "D" else "not what git has: a record is never changed"
            faults.append(Fault(place, wrong, f"`git checkout HEAD -- {place}`; a new run is a new file"))
    for place, (blob, commit, last) in committed.items():
        if place not in present:
            if withdrawals.record_of(place) in withdrawn:
                continue
            faults.append(Fault(place, f"taken away by commit {last}", f"`git checkout {commit} -- {place}`"))
        elif present[place] != blob:
            faults.append(Fault(place, f"changed by commit {last}", f"`git checkout {commit} -- {place}`"))
    if cut:
        notes.append("History checked in part: this clone is shallow.")
    return faults, notes


def _withdrawn(
    root: Path, committed: Mapping[str, object] | None
) -> tuple[Mapping[str, str], list[Fault], list[str]]:
    """What may be gone, what is wrong with that list (`committed` is None where git lacks some), and its length."""
    try:
        found = withdrawals.read(root)
    except SlimqwenError as error:
        return {}, [Fault(withdrawals.PLACE, *_parted(str(error)))], []
    faults = [
        Fault(place, f"withdrawn by {withdrawals.PLACE}, and there", f"`git rm {place}`, or strike the entry")
        for place in found
        if (root / place).exists()
    ]
    faults += [
        Fault(withdrawals.PLACE, f"withdraws {place}, which git never had", "strike the entry")
        for place in (found.keys() - committed.keys() if committed is not None else ())
    ]
    count = f"{len(found)} record{'s are' if len(found) > 1 else ' is'} withdrawn"
    return found, faults, [f"{count}; {withdrawals.PLACE} says why."] if found else []


def _originals(root: Path) -> dict[str, tuple[str, str, str]]:
    """Place -> the blob that was committed first, by which commit, and the last commit that touched it."""
    log = _git(
        root, "log", "--reverse", "--no-renames", "--relative", "--raw", "--no-abbrev", "-z", "--format=%x01%h",
        "--", *_RECORDS,
    )  # fmt: skip
    found: dict[str, tuple[str, str, str]] = {}
    commit = ""
    words = iter(log.replace("\x01", "\0\x01").split("\0"))
    for word in words:
        if word.startswith("\x01"):
            commit = word[1:].strip()
        elif word.lstrip("\n").startswith(":"):
            *_, blob, _status = word.split()
            place = next(words)
            first = found.get(place, (blob, commit, commit))
            found[place] = (*first[:2], commit)
    return found


def _pairs(listing: str) -> Iterator[tuple[str, str]]:
    words = listing.split("\0")
    return zip(words[::2], words[1::2], strict=False)


def _git(root: Path, *words: str) -> str:
    command = ["git", "-C", str(root), *words]
    return subprocess.run(command, capture_output=True, text=True, errors="replace", check=True).stdout
