"""The model card of a checkpoint that a recipe made: base, licences, scores, what a server needs for it, its gate."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from slimqwen import checkpoint
from slimqwen import variant as variants
from slimqwen.checkpoint import draft_head
from slimqwen.checkpoint.files import MANIFEST
from slimqwen.checkpoint.packing import IN_LAYER
from slimqwen.checkpoint.tensors import list_tensors
from slimqwen.checkpoint.weights import has_mtp_head, read_weights
from slimqwen.evals.gate import Gate
from slimqwen.evals.licences import Origin, describe_licence, list_parts
from slimqwen.evals.quality import MEASURE_NAMES, Quality
from slimqwen.evals.suites.suite import Suite
from slimqwen.formats.compressed_tensors import PackedIntegers
from slimqwen.identity.effects import Effect, affecting
from slimqwen.recipe.recipe_file import read_recipe
from slimqwen.records import provenance, store
from slimqwen.records.table import Table
from slimqwen.variant import Variant

if TYPE_CHECKING:
    from huggingface_hub import EvalResult


def render_card(variant: Variant, gate: Path, record: Gate, licence: str | None = None) -> str:
    """The text of the model card of a variant whose gate passed.

    Args:
        variant: the variant; a recipe must have made its checkpoint.
        gate: file of the gate record.
        record: content of that record.
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
        eval_results=list(_list_scores(variant, record)),
    )
    block = record.provenance
    flags = sorted(affecting(Effect.FIGURES, block.flags).items())
    paragraphs = [
        f"# {name}",
        f"Made from {origin.describe()} by Slimqwen: {recipe.description}",
        f"**Licence.** {describe_licence(stated, variant.weights)}{_describe_parts(variant)}",
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


def describe_elsewhere(folder: Path) -> str:
    """Describe how vLLM without Slimqwen's plugin would serve a checkpoint.

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


def tabulate_widths(folder: Path) -> list[Table]:
    """One table of the bits of each packed linear, layer by layer.

    It is left out, an empty list, if each linear has the same width in all layers.

    Raises:
        CorruptCheckpointError: the checkpoint cannot be read.
    """
    widths: dict[str, dict[int, str]] = {}
    for name, weight in read_weights(folder).items():
        if isinstance(weight.layout, PackedIntegers) and (match := IN_LAYER.fullmatch(name)):
            mark = "" if weight.layout.symmetric else "+"
            widths.setdefault(match[2], {})[int(match[1])] = f"{weight.layout.bits}{mark}"
    if all(len(set(row.values())) == 1 for row in widths.values()):
        return []
    layers = sorted({layer for row in widths.values() for layer in row})
    rows = tuple((str(layer), *(row.get(layer, "-") for row in widths.values())) for layer in layers)
    return [Table("Bits of a weight", ("layer", *widths), rows, ("+: with zero points.",))]


def _list_scores(variant: Variant, record: Gate) -> "Iterator[EvalResult]":
    """The variant's scores that the gate's records hold, for the card's model-index."""
    from huggingface_hub import EvalResult

    for path in record.evidence(variant.root / "experiments"):
        found = store.read_record(path)
        if not isinstance(found, Quality) or found.variant != variant.name:
            continue
        datasets = _name_datasets(Suite.load(found.suite, variant.root))
        for task, score in found.tasks.items():
            yield EvalResult(
                task_type="text-generation",
                dataset_type=datasets.get(task, task),
                dataset_name=datasets.get(task, f"{task}, of Slimqwen's suite {found.suite}"),
                metric_type=score.measure,
                metric_name=f"{task}: {MEASURE_NAMES.get(score.measure, score.measure)}",
                metric_value=score.value,
                metric_args={"standard_error": score.standard_error, "items": score.item_count},
            )


def _name_datasets(suite: Suite) -> dict[str, str]:
    """Task -> the hub's data set that it asks, for the tasks of a suite that ask one."""
    names: dict[str, str] = {}
    for task in suite.tasks:
        read = f"{task.data}/ {json.dumps(task.overrides)}"
        dataset = next((each for each in suite.datasets if f"{each.folder}/" in read), None)
        if name := dataset.repository if dataset else names.get(task.responses_of or ""):
            names[task.name] = name
    return names


def _describe_parts(variant: Variant) -> str:
    """What else the variant is made of or drafts with, with licences; empty if there is nothing but the base."""
    _, *others = list_parts(variant)
    lines = (f"- {part.role} {part.name}: {part.licence}" for part in others)
    return "\n\n" + "\n".join(lines) if others else ""
