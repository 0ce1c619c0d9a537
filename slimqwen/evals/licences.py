"""Where a checkpoint comes from, and the licence of each part: base, drafter, public texts of its recipes.

A base and a drafter state theirs in their own model card or licence file, a public text in eval/corpora/.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from slimqwen import variant as variants
from slimqwen.checkpoint.files import CARD
from slimqwen.evals.suites.corpora import Corpus
from slimqwen.recipe import variant_recipe
from slimqwen.recipe.recipe_file import find_base_variant, read_recipe
from slimqwen.variant import Variant
from slimqwen.workspace import locate

UNKNOWN = "unknown"

_LICENCE_FILES = ("LICENSE", "LICENCE", "COPYING")
"""Beginnings of the names of licence files, in any case."""

_KNOWN_LICENCES = {"apache license version 2.0": "apache-2.0", "mit license": "mit"}
"""How the text of a licence begins, in lower case and with single spaces -> its identifier on the hub."""

_NON_COMMERCIAL = re.compile(r"-nc\b|non-?commercial|\bresearch\b", re.IGNORECASE)
"""What identifiers and names of licences say that forbid commercial use: cc-by-nc-4.0, qwen-research."""


class Origin(NamedTuple):
    """The checkpoint from which a variant's recipes start, and what its model card says.

    Attributes:
        name: repository on the hub, or the variant's name if it is no copy of one.
        parents: repositories of which its model card says that it was made from them.
        metadata: front matter of its model card; empty without a card.
    """

    name: str
    parents: list[str]
    metadata: Mapping[str, Any]

    @classmethod
    def of(cls, variant: Variant) -> "Origin":
        """Find the checkpoint from which a variant is made: the recipes are followed from base to base, to the first.

        Raises:
            RecipeError: a recipe cannot be used.
        """
        *_, base = _chain(variant)
        setting = base.settings.get("SOURCE")  # owner/name, or owner/name/file.gguf
        source = "/".join(setting.value.split("/")[:2]) if setting else base.name
        metadata = _front_matter(base.weights / CARD)
        parents = metadata.get("base_model") or []
        parents = [parents] if isinstance(parents, str) else parents
        return cls(source, [parent for parent in parents if isinstance(parent, str)], metadata)

    @property
    def is_on_hub(self) -> bool:
        """Whether `name` is a repository."""
        return "/" in self.name

    @property
    def base_model(self) -> str | list[str]:
        """Value of `base_model` in a model card: the repository, else those that the checkpoint's own card names."""
        if self.is_on_hub or not self.parents:
            return self.name
        return self.parents[0] if len(self.parents) == 1 else self.parents

    def describe(self) -> str:
        """Name the checkpoint and what it was made from; the text may end in a comma, so another has to follow it."""
        if self.is_on_hub or not self.parents:
            return self.name
        return f"{self.name}, which was made from {' and '.join(self.parents)} by its own model card,"

    def licence(self, folder: Path) -> dict[str, str]:
        """The licence of a checkpoint made from this one, as keys of a model card's front matter, such as `license`.

        If the card states none, a licence file in `folder` decides; without one it is "other" for a hub repository,
        else UNKNOWN.
        """
        if stated := _stated_licence(self.name, self.metadata, folder):
            return stated
        if self.is_on_hub:
            page = f"https://huggingface.co/{self.name}"
            return {"license": "other", "license_name": f"that of {self.name}", "license_link": page}
        return {"license": UNKNOWN}


class LicensedPart(NamedTuple):
    """Something that a variant is made of or drafts with.

    Attributes:
        role: base, drafter or text.
        name: variant, repository or folder.
        licence: licence that it states; UNKNOWN if it states none.
        is_non_commercial: whether the licence forbids commercial use.
    """

    role: str
    name: str
    licence: str
    is_non_commercial: bool

    @property
    def fault(self) -> str | None:
        """Why the part cannot be published without permission of its owner; None if it can."""
        if self.licence == UNKNOWN:
            return f"{self.name} states no licence"
        return f"{self.name} has the licence {self.licence}" if self.is_non_commercial else None


def list_parts(variant: Variant) -> list[LicensedPart]:
    """The base, the drafter that the variant's flags name, and the public texts that its recipes read.

    Raises:
        RecipeError: a recipe cannot be used.
        SettingsError: a file of eval/corpora/ cannot be used.
    """
    origin = Origin.of(variant)
    parts = [_describe_model("base", origin.name, origin.metadata, variant.weights)]
    if drafter := _name_drafter(variant):
        folder = locate(drafter, variant.root)
        name = folder.name if Path(drafter).is_absolute() else drafter
        parts.append(_describe_model("drafter", name, _front_matter(folder / CARD), folder))
    for made in _chain(variant):
        for corpus in variant_recipe.list_corpora(made):
            for text in Corpus.load(corpus, variant.root).parts.values():
                forbids = bool(_NON_COMMERCIAL.search(text.licence))
                parts.append(LicensedPart("text", text.repository, text.licence, forbids))
    return list(dict.fromkeys(parts))


def describe_licence(licence: Mapping[str, str], folder: Path) -> str:
    """A licence in words, with the file or page that has its text; for an unknown one, a sentence that none is stated.

    Args:
        licence: keys of the front matter, as of `Origin.licence`.
        folder: the checkpoint.
    """
    file = _licence_file(folder)
    link = licence.get("license_link", "")
    place = f"; its text is in `{file.name}`" if file else f"; see {link}" if link else ""
    if licence["license"] == UNKNOWN:
        return "Neither the base's model card nor a licence file states one."
    return f"{licence.get('license_name', licence['license'])}{place}."


def _chain(variant: Variant) -> Iterator[Variant]:
    """The variant that a recipe made, its base, and so on to the one that no recipe made."""
    made = variants.load(variant.weights.relative_to(variant.root / "weights").parts[0], variant.root)
    yield made
    while made.recipe is not None:
        made = variants.load(find_base_variant(read_recipe(made.recipe).base, variant.root), variant.root)
        yield made


def _name_drafter(variant: Variant) -> str | None:
    """Folder or repository of a drafter that is no part of the served checkpoint."""
    setting = variant.settings.get("VLLM_SPECULATIVE_CONFIG")
    model = json.loads(setting.value).get("model") if setting else None
    return model if model and locate(model, variant.root) != variant.weights else None


def _describe_model(role: str, name: str, metadata: Mapping[str, Any], folder: Path) -> LicensedPart:
    stated = _stated_licence(name, metadata, folder)
    licence = stated.get("license_name", stated.get("license", UNKNOWN))
    file = _licence_file(folder)
    text = (
        file.read_text(encoding="utf-8", errors="replace")
        if file and stated.get("license") == "other"
        else ""
    )
    return LicensedPart(
        role, name, licence, bool(_NON_COMMERCIAL.search(licence)) or "non-commercial" in text.lower()
    )


def _stated_licence(name: str, metadata: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """The licence that a model card or a licence file states; empty where neither does.

    Args:
        name: repository or variant whose licence it is.
        metadata: front matter of its model card.
        folder: folder with its licence file.
    """
    keys = ("license", "license_name", "license_link")
    if isinstance(metadata.get("license"), str):
        stated = {key: str(metadata[key]) for key in keys if metadata.get(key)}
        link = stated.get("license_link", "")
        # A link to a file of the base's repository leads nowhere from another one.
        if link and "://" not in link and not (folder / link).is_file():
            del stated["license_link"]
            if "/" in name:
                stated["license_link"] = f"https://huggingface.co/{name}/blob/main/{link}"
        return stated
    if (file := _licence_file(folder)) is None:
        return {}
    text = " ".join(file.read_text(encoding="utf-8", errors="replace").lower().split())
    for beginning, identifier in _KNOWN_LICENCES.items():
        if text.startswith(beginning):
            return {"license": identifier}
    return {"license": "other", "license_name": f"that of {name}", "license_link": file.name}


def _licence_file(folder: Path) -> Path | None:
    files = sorted(folder.glob("*")) if folder.is_dir() else []
    return next(
        (file for file in files if file.name.upper().startswith(_LICENCE_FILES) and file.is_file()), None
    )


def _front_matter(card: Path) -> dict[str, Any]:
    """The front matter of a model card; empty without a card, or where it cannot be read."""
    from huggingface_hub import metadata_load

    try:
        return metadata_load(card) or {}
    except (OSError, ValueError, yaml.YAMLError):
        return {}
