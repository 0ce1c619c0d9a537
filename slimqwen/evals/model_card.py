"""The model card of a checkpoint that a recipe made: base, licence, what a server needs for it, and its gate.

Base and licence come from the base's own model card and licence file; what neither states, the card calls unknown.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from slimqwen import checkpoint
from slimqwen import variant as variants
from slimqwen.checkpoint import draft_head
from slimqwen.checkpoint.files import CARD, MANIFEST
from slimqwen.checkpoint.tensors import list_tensors
from slimqwen.checkpoint.weights import has_mtp_head, read_weights
from slimqwen.evals.gate import Gate
from slimqwen.formats.compressed_tensors import PackedIntegers
from slimqwen.identity.effects import Effect, affecting
from slimqwen.recipe.recipe_file import find_base_variant, read_recipe
from slimqwen.records import provenance
from slimqwen.records.table import Table
from slimqwen.variant import Variant

_LICENCE_FILES = ("LICENSE", "LICENCE", "COPYING")
"""Beginnings of the names of licence files, in any case."""

_KNOWN_LICENCES = {"apache license version 2.0": "apache-2.0", "mit license": "mit"}
"""How the text of a licence begins, in lower case and with single spaces -> its identifier on the hub."""


_LINEAR = re.compile(r"(?!mtp\.)(?:.*\.)?layers\.(\d+)\.(.+)\.weight")


class Origin(NamedTuple):
    """The checkpoint at the start of a chain of recipes.

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
        """Follow the recipes of a variant to their first base.

        Raises:
            RecipeError: a recipe cannot be used.
        """
        made = variant.weights.relative_to(variant.root / "weights").parts[0]
        base = variants.load(made, variant.root)
        while base.recipe is not None:
            base = variants.load(find_base_variant(read_recipe(base.recipe).base, variant.root), variant.root)
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
        """What a reader of the card can look up: the repository, else the repositories that its own card names."""
        if self.is_on_hub or not self.parents:
            return self.name
        return self.parents[0] if len(self.parents) == 1 else self.parents

    def describe(self) -> str:
        """The checkpoint in words."""
        if self.is_on_hub or not self.parents:
            return self.name
        return f"{self.name}, which was made from {' and '.join(self.parents)} by its own model card,"

    def licence(self, folder: Path) -> dict[str, str]:
        """The keys of the front matter that state the licence of a checkpoint made from this one."""
        keys = ("license", "license_name", "license_link")
        if isinstance(self.metadata.get("license"), str):
            stated = {key: str(self.metadata[key]) for key in keys if self.metadata.get(key)}
            link = stated.get("license_link", "")
            # A link to a file of the base's repository leads nowhere from another one.
            if link and "://" not in link and not (folder / link).is_file():
                del stated["license_link"]
                if self.is_on_hub:
                    stated["license_link"] = f"https://huggingface.co/{self.name}/blob/main/{link}"
            return stated
        if (file := _licence_file(folder)) is not None:
            text = " ".join(file.read_text(encoding="utf-8", errors="replace").lower().split())
            for beginning, identifier in _KNOWN_LICENCES.items():
                if text.startswith(beginning):
                    return {"license": identifier}
            return {"license": "other", "license_name": f"that of {self.name}", "license_link": file.name}
        if self.is_on_hub:
            page = f"https://huggingface.co/{self.name}"
            return {"license": "other", "license_name": f"that of {self.name}", "license_link": page}
        return {"license": "unknown"}


def render_card(variant: Variant, gate: Path, record: Gate, licence: str | None = None) -> str:
    """The model card of a variant whose gate passed.

    Args:
        gate: file of `record`.
        licence: identifier of the licence to state; None for that of the base.

    Raises:
        RecipeError: a recipe cannot be used.
        CorruptCheckpointError: the checkpoint cannot be read.
    """
    # Slow to import, and only promotion needs it.
    from huggingface_hub import ModelCard, ModelCardData

    name = variant.weights.relative_to(variant.root / "weights").parts[0]
    recipe = read_recipe(variants.load(name, variant.root).recipe_file)
    origin = Origin.of(variant)
    stated = {"license": licence} if licence else origin.licence(variant.weights)
    config = checkpoint.read_config(variant.weights)
    quantisation = checkpoint.quantisation(config)
    data = ModelCardData(
        base_model=origin.base_model,
        base_model_relation="quantized" if quantisation else "finetune",
        **stated,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=[
            "slimqwen",
            "vllm",
            config["model_type"],
            *([quantisation["quant_method"]] if quantisation else []),
        ],
        model_name=name,
    )
    block = record.provenance
    flags = sorted(affecting(Effect.FIGURES, block.flags).items())
    paragraphs = [
        f"# {name}",
        f"Made from {origin.describe()} by Slimqwen: {recipe.description}",
        f"**Licence.** {_describe_licence(stated, variant.weights)}",
        f"SHA-256 of the checkpoint `{block.checkpoint.digest}`, {block.checkpoint.size_bytes / 1e6:,.1f} MB; "
        f"`{MANIFEST}` lists every file.",
        f"**Hypothesis.** {variant.hypothesis}",
        *(table.as_markdown().rstrip() for table in tabulate_widths(variant.weights)),
        f"**Without Slimqwen.** {describe_elsewhere(variant.weights)}",
        f"Promoted by the gate of {block.ended[:10]} against {record.baseline}:",
        *(table.as_markdown().rstrip() for table in record.tables(gate)),
        *([] if block.hardware.gpus else [provenance.CPU_NOTE]),
        f"`slimqwen serve --variant {variant.name}` serves it; the gate was passed with these flags of vLLM:",
        *([f"{variants.DRAFTS_NOTE}."] if "speculative-config" in block.flags else []),
        "\n".join(
            ["```", *(f"{flag}: {json.dumps(value)}" for flag, value in flags if flag != "model"), "```"]
        ),
    ]
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(paragraphs) + "\n"))


def tabulate_widths(folder: Path) -> list[Table]:
    """Bits of each packed linear, layer by layer; no table where all linears of a name have one width.

    Raises:
        CorruptCheckpointError: the checkpoint cannot be read.
    """
    widths: dict[str, dict[int, str]] = {}
    for name, weight in read_weights(folder).items():
        if isinstance(weight.layout, PackedIntegers) and (match := _LINEAR.fullmatch(name)):
            mark = "" if weight.layout.symmetric else "+"
            widths.setdefault(match[2], {})[int(match[1])] = f"{weight.layout.bits}{mark}"
    if all(len(set(row.values())) == 1 for row in widths.values()):
        return []
    layers = sorted({layer for row in widths.values() for layer in row})
    rows = tuple((str(layer), *(row.get(layer, "-") for row in widths.values())) for layer in layers)
    return [Table("Bits of a weight", ("layer", *widths), rows, ("+: with zero points.",))]


def describe_elsewhere(folder: Path) -> str:
    """What vLLM without Slimqwen's plugin does with a checkpoint.

    Raises:
        CorruptCheckpointError: the checkpoint cannot be read.
    """
    tensors = list_tensors(folder)
    head = tensors.get(draft_head.TOKEN_IDS)
    if not has_mtp_head(folder):
        drafts = "The folder has no MTP head and nothing that needs Slimqwen's plugin of vLLM."
    elif head is None:
        drafts = "The MTP head drafts from the full vocabulary, which needs no plugin."
    elif head.file.name == draft_head.FILE:
        drafts = (
            f"The trimmed draft vocabulary ({head.shape[0]} ids, in `{draft_head.FILE}`) needs Slimqwen's plugin "
            "of vLLM. vLLM without the plugin does not open that file: it serves this folder, too, and the MTP head "
            "drafts from the full vocabulary; responses do not depend on drafts."
        )
    else:
        drafts = (
            f"The trimmed draft vocabulary ({head.shape[0]} ids, among the tensors of `{head.file.name}`) needs "
            "Slimqwen's plugin of vLLM. vLLM without the plugin serves this folder without drafts, but ends at the "
            "start with MTP (no module or parameter named 'draft_head'); a checkpoint made anew has the ids in a "
            "file of their own."
        )
    if any(name.endswith(".embed_tokens.weight_packed") for name in tensors):
        drafts += (
            " The packed embedding needs the plugin, too: vLLM's classes of Qwen3.5 and Llama do not pass it the "
            "quantisation config (vllm#54304), and loading ends."
        )
    return f"{drafts} On a CPU, vLLM needs the plugin's fixes for any MTP head and for 8-bit weights (W8A16)."


def _describe_licence(licence: Mapping[str, str], folder: Path) -> str:
    file = _licence_file(folder)
    link = licence.get("license_link", "")
    place = f"; its text is in `{file.name}`" if file else f"; see {link}" if link else ""
    if licence["license"] == "unknown":
        return "Neither the base's model card nor a licence file states one."
    return f"{licence.get('license_name', licence['license'])}{place}."


def _licence_file(folder: Path) -> Path | None:
    files = sorted(file for file in folder.iterdir() if file.name.upper().startswith(_LICENCE_FILES))
    return next((file for file in files if file.is_file()), None)


def _front_matter(card: Path) -> dict[str, Any]:
    """The front matter of a model card; empty without a card, or where it cannot be read."""
    from huggingface_hub import metadata_load

    try:
        return metadata_load(card) or {}
    except (OSError, ValueError, yaml.YAMLError):
        return {}
