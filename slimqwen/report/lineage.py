"""Lineage of a variant: flags that differ from its base, its family, its recipe, the size after each stage."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from slimqwen import checkpoint
from slimqwen import variant as variants
from slimqwen.checkpoint.files import COMPILE_CACHE, MANIFEST, bytes_on_disk
from slimqwen.errors import SlimqwenError
from slimqwen.recipe import recipe_file
from slimqwen.recipe.recipe_file import Recipe, Step
from slimqwen.records.collection import Problem
from slimqwen.variant import Variant


@dataclass(frozen=True)
class Change:
    """A key of config.env that differs from the base's.

    Attributes:
        before: the base's value; None if the base does not set it.
        after: the variant's value; None if unset.
        location: file and line that sets or unsets it.
    """

    key: str
    before: str | None
    after: str | None
    location: str


@dataclass(frozen=True)
class Kin:
    """A variant in the tree of bases.

    Attributes:
        notes: its roles for the variant of the page: baseline, source of the checkpoint.
        children: variants that name it as BASE.
    """

    name: str
    notes: tuple[str, ...]
    children: tuple["Kin", ...]


@dataclass(frozen=True)
class StageSize:
    """Bytes on disk after a stage; the first entry is the base of the recipe."""

    stage: str
    size_bytes: int


class Family:
    """All readable variants of a repository and their BASE relations."""

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
        for name, variant in self.members.items():
            if len(variant.lineage) > 1:
                self._children.setdefault(variant.lineage[1], []).append(name)

    def founder(self, name: str, baselines: Mapping[str, str | None]) -> str:
        """The variant that a family starts from: the oldest base, then its baseline's oldest base, and so on."""
        seen: set[str] = set()
        while name not in seen:
            seen.add(name)
            member = self.members.get(name)
            name = member.lineage[-1] if member else name
            name = baselines.get(name) or name
        return name

    def changes(self, name: str) -> list[Change]:
        """Keys of a variant that differ from its base; all keys of a variant without a base."""
        variant = self.members[name]
        base = self.members.get(variant.lineage[1]) if len(variant.lineage) > 1 else None
        before = base.settings if base else {}
        unset = {setting.key: setting for setting in variant.unset}
        changes = []
        for key in dict.fromkeys([*before, *variant.settings]):
            old, new = before.get(key), variant.settings.get(key)
            if old and new and old.value == new.value:
                continue
            location = new.location if new else unset[key].location
            changes.append(Change(key, old.value if old else None, new.value if new else None, location))
        return changes

    def tree(self, name: str) -> Kin:
        """The variant with its bases and descendants, from the oldest base on."""
        variant = self.members[name]
        recipe = self.recipe(name)
        notes: dict[str, tuple[str, ...]] = {}
        for other, role in (
            (variant.baseline, "its baseline"),
            (recipe.base if recipe else None, "its checkpoint's source"),
        ):
            if other:
                notes[other] = (*notes.get(other, ()), role)
        bases = set(variant.lineage)

        def kin(member: str) -> Kin:
            children = self._children.get(member, ())
            if member in bases and member != name:
                # Relatives that are neither bases nor descendants are left out.
                children = [child for child in children if child in bases]
            return Kin(member, notes.get(member, ()), tuple(kin(child) for child in sorted(children)))

        return kin(variant.lineage[-1])

    def recipe(self, name: str) -> Recipe | None:
        """Recipe of a variant; None without a readable one (`slimqwen recipe status` names the fault)."""
        file = self.members[name].recipe
        try:
            return recipe_file.read(file) if file else None
        except SlimqwenError:
            return None

    def stage_sizes(self, name: str) -> list[StageSize]:
        """Bytes after each stage, from the manifests on this machine; empty without the checkpoint."""
        variant = self.members[name]
        recipe = self.recipe(name)
        entry = variant.weights.resolve()
        if recipe is None or entry.parent != (self.root / "weights" / "store").resolve():
            return []
        sizes: list[StageSize] = []
        seen: set[Path] = set()
        try:
            while entry not in seen and entry.parent.name == "store":
                seen.add(entry)
                manifest = checkpoint.Manifest.read(entry)
                sizes.append(StageSize(manifest.stage, bytes_on_disk(entry)))
                source = self._checkpoints.get(manifest.ingredients["input"])
                if source is None:
                    return []
                entry = source
            sizes.append(StageSize(recipe.base, bytes_on_disk(entry)))
        except (SlimqwenError, OSError, KeyError):
            return []
        return sizes[::-1]

    @cached_property
    def _checkpoints(self) -> Mapping[str, Path]:
        """Checkpoints with a manifest by digest, without baked ones, which no stage reads."""
        weights = self.root / "weights"
        checkpoints: dict[str, Path] = {}
        for folder in (*weights.glob("*/"), *weights.glob("store/*/")):
            # Without a manifest a digest would be a hash of gigabytes.
            if (folder / MANIFEST).is_file() and not (folder / COMPILE_CACHE[0]).is_file():
                checkpoints.setdefault(checkpoint.digest(folder), folder.resolve())
        return checkpoints


def parameters(step: Step) -> dict[str, str]:
    """The parameters that a recipe gives a stage, by dotted name."""
    return dict(_flat("", step.parameters.model_dump(mode="json", exclude_unset=True)))


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), inner)
    else:
        yield prefix, ", ".join(map(str, value)) if isinstance(value, list) else str(value)
