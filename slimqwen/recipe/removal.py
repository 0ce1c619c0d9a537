"""Removes a variant: finds what that would delete, and which other variants still need it."""

import json
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml

from slimqwen import variant as variants
from slimqwen.checkpoint.files import bytes_on_disk
from slimqwen.errors import SlimqwenError
from slimqwen.recipe.recipe_file import RecipeError, find_base_variant
from slimqwen.records.git import tracked_files
from slimqwen.variant.config_env import read_config_env


class RemovalError(SlimqwenError):
    """A variant that cannot be removed. Nothing was deleted."""


@dataclass(frozen=True)
class Removal:
    """What the removal of a variant deletes.

    Attributes:
        folder: experiments/<variant>.
        link: weights/<variant>, if it is the link to an output of a recipe.
        kept: weights/<variant>, if it is a folder, which stays.
        unsaved: sorted files of the folder that git does not hold; all of them outside a git checkout.
    """

    root: Path
    folder: Path
    link: Path | None
    kept: Path | None
    unsaved: tuple[str, ...]

    def describe(self) -> list[str]:
        """Sentences about what is deleted and what is kept."""
        files = sum(1 for _ in self.folder.iterdir())
        lost = f", {len(self.unsaved)} of which git does not hold: {', '.join(self.unsaved[:3])}"
        more = " …" if len(self.unsaved) > 3 else ""
        lines = [f"deletes {files} files of {self.folder.relative_to(self.root)}"]
        lines[0] += f"{lost}{more}" if self.unsaved else "; git's history keeps them"
        if self.link:
            lines.append(
                f"deletes {self.link.relative_to(self.root)}, and the outputs of recipes that no other variant uses"
            )
        if self.kept:
            size = bytes_on_disk(self.kept) / 1e9
            lines.append(
                f"keeps {self.kept.relative_to(self.root)} ({size:.2f} GB): no recipe made it; "
                f"`rm -r {self.kept.relative_to(self.root)}` deletes it"
            )
        return lines


def plan_removal(name: str, root: Path) -> Removal:
    """Find out what the removal of a variant would delete.

    Raises:
        RemovalError: there is no such variant in the workspace, or another variant needs it.
    """
    folder = root / "experiments" / name
    if not (folder / "config.env").is_file():
        where = "is a part of the installation" if name in variants.names(root) else "does not exist here"
        raise RemovalError(f"{name} {where}; `slimqwen variant list` shows what can be removed")
    if users := list_users(name, root):
        raise RemovalError(
            f"{name} is needed: {'; '.join(f'{how} of {user}' for user, how in users.items())}; change or remove "
            f"{'it' if len(users) == 1 else 'them'} first"
        )
    weights = root / "weights" / name
    tracked = tracked_files(root, f"experiments/{name}") or frozenset()
    unsaved = (file for file in sorted(folder.iterdir()) if f"experiments/{name}/{file.name}" not in tracked)
    return Removal(
        root,
        folder,
        weights if weights.is_symlink() else None,
        weights if weights.is_dir() and not weights.is_symlink() else None,
        tuple(file.name for file in unsaved),
    )


def list_users(name: str, root: Path) -> dict[str, str]:
    """Find the variants of a workspace that need `name`; unreadable files are skipped.

    Returns:
        Name of such a variant -> how it refers to `name`: "BASE", "the baseline", "the recipe's base" or "a line with
        weights/<name>".
    """
    weights, users = f"weights/{name}", {}
    for other in variants.local_names(root):
        folder = root / "experiments" / other
        if other == name or not (folder / "config.env").is_file():
            continue
        lines = read_config_env(folder / "config.env")
        if "BASE" in lines and lines["BASE"].value == name:
            users[other] = "BASE"
        elif any(weights in setting.value.split('"') for setting in lines.values()):  # or in JSON
            users[other] = f"a line with {weights}"
        elif _read(folder / "measurements.json", json.loads).get("baseline") == name:
            users[other] = "the baseline"
        elif _is_base(name, _read(folder / "recipe.yaml", yaml.safe_load).get("base"), root):
            users[other] = "the recipe's base"
    return users


def remove_variant(removal: Removal) -> None:
    """Delete the folder and the link of a removal; `variant_recipe.clean` then frees outputs that nothing else uses."""
    scratch = removal.root / ".cache"
    scratch.mkdir(exist_ok=True)
    hidden = scratch / f"removed-{removal.folder.name}.{secrets.token_hex(4)}"
    removal.folder.rename(hidden)  # at once: a killed removal leaves no half of a variant
    if removal.link:
        removal.link.unlink()
    shutil.rmtree(hidden)


def _is_base(name: str, base: object, root: Path) -> bool:
    """Whether a recipe's `base` is the variant `name`, or the hub repository that it copies."""
    try:
        return bool(base) and name in (base, find_base_variant(str(base), root))
    except RecipeError:  # a repository that no variant here copies
        return False


def _read(file: Path, parse: Callable[[str], object]) -> dict[str, object]:
    try:
        content = parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}
