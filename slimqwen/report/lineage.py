"""Where a variant comes from: its flags against its base's, its family, its recipe, the size after each stage."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from slimqwen import checkpoint
from slimqwen import variant as variants
from slimqwen.errors import SlimqwenError
from slimqwen.records.collection import Problem
from slimqwen.variant import Variant


@dataclass(frozen=True)
class Change:
    """One key of config.env that differs from the base's.

    Attributes:
        key: as written.
        before: the base's value, None where it has none.
        after: the variant's value, None where it unsets the key.
        place: file and line of what decides it.
    """

    key: str
    before: str | None
    after: str | None
    place: str


@dataclass(frozen=True)
class Kin:
    """A variant in the tree of bases.

    Attributes:
        name: of the variant.
        notes: what it is to the variant whose page this is: itself, its baseline, its checkpoint's source.
        children: the variants whose BASE it is.
    """

    name: str
    notes: tuple[str, ...]
    children: tuple["Kin", ...]


@dataclass(frozen=True)
class Step:
    """A stage of a recipe, its parameters by dotted name."""

    stage: str
    parameters: Mapping[str, str]


@dataclass(frozen=True)
class Recipe:
    """A recipe.yaml as far as it can be read.

    Attributes:
        description: what it is for.
        base: the checkpoint that it starts from.
        steps: in order.
    """

    description: str
    base: str
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class StageSize:
    """Bytes on disk after a stage; the first is what the recipe started from."""

    stage: str
    size_bytes: int


class Family:
    """All variants of a repository that can be read, and who comes from whom."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.members: dict[str, Variant] = {}
        self.problems: list[Problem] = []
        for name in variants.names(root):
            try:
                self.members[name] = variants.load(name, root)
            except SlimqwenError as error:
                self.problems.append(Problem(f"experiments/{name}/config.env", str(error)))
        self._children: dict[str, list[str]] = {}
        for name, one in self.members.items():
            if len(one.lineage) > 1:
                self._children.setdefault(one.lineage[1], []).append(name)
        self._store: dict[str, Path] | None = None

    def changes(self, name: str) -> list[Change]:
        """A variant's flags as a diff from its base's; of a variant without a base, all of them."""
        one = self.members[name]
        base = self.members.get(one.lineage[1]) if len(one.lineage) > 1 else None
        before = base.settings if base else {}
        unset = {setting.key: setting for setting in one.unset}
        found = []
        for key in dict.fromkeys([*before, *one.settings]):
            old, new = before.get(key), one.settings.get(key)
            if old and new and old.value == new.value:
                continue
            place = new.place if new else unset[key].place
            found.append(Change(key, old.value if old else None, new.value if new else None, place))
        return found

    def tree(self, name: str) -> Kin:
        """The variant among its bases and all that comes from it, from the oldest base on."""
        one = self.members[name]
        recipe = self.recipe(name)
        notes: dict[str, tuple[str, ...]] = {name: ("this variant",)}
        for other, what in (
            (one.baseline, "its baseline"),
            (recipe.base if recipe else None, "its checkpoint's source"),
        ):
            if other:
                notes[other] = (*notes.get(other, ()), what)
        line = set(one.lineage)

        def kin(of: str) -> Kin:
            # Beside the line from the oldest base to this variant, only what comes from this variant.
            below = self._children.get(of, ())
            children = below if of not in line or of == name else [child for child in below if child in line]
            return Kin(of, notes.get(of, ()), tuple(kin(child) for child in sorted(children)))

        return kin(one.lineage[-1])

    def recipe(self, name: str) -> Recipe | None:
        """A variant's recipe; None where it has none, or one that is no recipe (`make recipe-status` says why)."""
        file = self.members[name].recipe
        if file is None:
            return None
        try:
            content = yaml.safe_load(file.read_text(encoding="utf-8"))
            steps = [next(iter(stage.items())) for stage in content["stages"]]
            return Recipe(
                str(content["description"]),
                str(content["base"]),
                tuple(Step(str(stage), dict(_flat("", parameters or {}))) for stage, parameters in steps),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, StopIteration, yaml.YAMLError):
            return None

    def stage_sizes(self, name: str) -> list[StageSize]:
        """Bytes after each stage, from the manifests on this machine; empty where the checkpoint is not here."""
        one = self.members[name]
        recipe = self.recipe(name)
        entry = one.weights.resolve()
        if recipe is None or entry.parent != (self.root / "weights" / "store").resolve():
            return []
        found: list[StageSize] = []
        seen: set[Path] = set()
        try:
            while entry not in seen and entry.parent.name == "store":
                seen.add(entry)
                manifest = checkpoint.Manifest.read(entry)
                found.append(StageSize(manifest.stage, checkpoint.bytes_on_disk(entry)))
                before = self._entries().get(manifest.ingredients["input"])
                if before is None:
                    return []
                entry = before
            found.append(StageSize(recipe.base, checkpoint.bytes_on_disk(entry)))
        except (SlimqwenError, OSError, KeyError):
            return []
        return found[::-1]

    def _entries(self) -> Mapping[str, Path]:
        """Checkpoints with a manifest by digest; what a later stage takes in is never a baked one."""
        if self._store is None:
            weights = self.root / "weights"
            self._store = {}
            for folder in _with_manifest([*weights.glob("*/"), *weights.glob("store/*/")]):
                if not (folder / checkpoint.COMPILE_CACHE[0]).is_file():
                    self._store.setdefault(checkpoint.digest(folder), folder.resolve())
        return self._store


def _with_manifest(folders: Sequence[Path]) -> Iterable[Path]:
    # Without a manifest a digest would be a hash of gigabytes.
    return [folder for folder in folders if (folder / checkpoint.MANIFEST).is_file()]


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), inner)
    else:
        yield prefix, ", ".join(map(str, value)) if isinstance(value, list) else str(value)
