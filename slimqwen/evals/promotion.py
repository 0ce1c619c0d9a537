"""Promotion of a variant whose gate passed with its present checkpoint and flags: its status and its model card.

The card lies in the checkpoint as README.md and is not part of its manifest and digest. It is written only into
checkpoints that a recipe made. Promoted variants that serve the same checkpoint share one card, which covers them all.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimqwen import checkpoint
from slimqwen import variant as variants
from slimqwen.checkpoint.files import CARD, MANIFEST
from slimqwen.errors import SlimqwenError
from slimqwen.evals import EvalError
from slimqwen.evals.gate import Gate
from slimqwen.evals.quality import Quality
from slimqwen.recipe import recipe_file
from slimqwen.records import differences, provenance, store
from slimqwen.records.differences import Circumstance
from slimqwen.serving.command import ServerCommand
from slimqwen.stats.verdict import Verdict
from slimqwen.variant import Variant

_PROMOTED = "promoted"
_BINDING = (Circumstance.CHECKPOINT, Circumstance.DATA, Circumstance.FLAGS, Circumstance.PACKAGES)
"""Circumstances that a gate record must share with the present variant. Hardware and commit may differ."""


@dataclass(frozen=True)
class GatedVariant:
    """A variant and the gate record that it passed with."""

    variant: Variant
    path: Path
    record: Gate

    @property
    def evidence(self) -> list[Path]:
        """The records that the gate record cites."""
        return self.record.evidence(self.variant.root / "experiments")


@dataclass(frozen=True)
class Promotion:
    """The outcome of a promotion.

    Attributes:
        gate: the gate record that passed.
        card: model card; None where no recipe made the checkpoint.
        changed: whether a file was written.
    """

    gate: Path
    card: Path | None
    changed: bool


def promote_variant(variant: Variant) -> Promotion:
    """Set a variant's status and write its checkpoint's card, if its gate passed in its present state.

    Raises:
        EvalError: no gate record fits the present checkpoint and flags, the newest that fits has not passed, one of
            its records is missing, or the variant is a baseline or was rejected. Nothing was changed.
    """
    if variant.baseline is None:
        raise EvalError(
            f"{variant.name} is a baseline; only a variant that was compared with one is promoted"
        )
    variant.require_weights()
    old_claims = store.read_measurements(variant.folder)
    if old_claims.status == "rejected":
        raise EvalError(
            f"{variant.name} was rejected; if that no longer holds, set its status in experiments/{variant.name}/"
            "measurements.json to measured first"
        )
    gated = _passing_gate(variant)
    digest = gated.record.provenance.checkpoint.digest
    # Records of an earlier checkpoint support nothing that is promoted now.
    current_names = {
        name
        for name in old_claims.records
        if store.read(variant.folder / name).provenance.checkpoint_digest == digest
    }
    current_names |= {
        gated.path.name,
        *(path.name for path in gated.evidence if path.parent == variant.folder),
    }
    new_claims = old_claims.model_copy(
        update={"status": _PROMOTED, "verdict": Verdict.PASS, "records": tuple(sorted(current_names))}
    )
    folder, card, changed = variant.weights.resolve(), None, old_claims != new_claims
    weights = variant.root / "weights"
    if variant.weights.parent == weights and folder.parent == (weights / "store").resolve():
        card = folder / CARD
        text = _render_card([gated, *_other_promoted(variant)])
        if not card.is_file() or card.read_text(encoding="utf-8") != text:
            store.publish(card, text.encode(), replace=True)
            changed = True
    if old_claims != new_claims:
        location = f"experiments/{variant.name}/measurements.json"
        store.validate(new_claims.as_json(), location)
        text = json.dumps(new_claims.as_json(), indent=2, ensure_ascii=False) + "\n"
        store.publish(variant.root / location, text.encode(), replace=True)
    return Promotion(gated.path, card and variant.weights / CARD, changed)


def _passing_gate(variant: Variant) -> GatedVariant:
    """The newest gate record that fits the variant's present state, if it passed."""
    command = f"`slimqwen gate --variant {variant.name}`"
    newest_difference = None
    for path in store.records(variant.folder, Gate):
        record = store.read(path, Gate)
        if record.split:
            continue  # a search or its proof measured only some of the items
        if changes := _changes(variant, record):
            newest_difference = newest_difference or f"{path.name} differs in {', '.join(changes)}"
            continue
        location = f"{variant.name}/{path.name}"
        if record.verdict != Verdict.PASS:
            checks = ", ".join(
                f"{check}: {verdict}" for check, verdict in record.verdicts.items() if verdict != Verdict.PASS
            )
            raise EvalError(
                f"the newest gate record of {variant.name} in its present state says {record.verdict} "
                f"({checks}; {location}); mend the variant, and promote it after {command} passes"
            )
        gated = GatedVariant(variant, path, record)
        for cited in gated.evidence:
            name = f"{cited.parent.name}/{cited.name}"
            if not cited.is_file():
                raise EvalError(
                    f"{name} is missing, but {location} cites it; restore it by `git checkout` if it was committed, "
                    f"otherwise run {command}"
                )
            if files := provenance.changed_data(store.read(cited).provenance, variant.root):
                raise EvalError(
                    f"{files[0]} has changed since {name}, which {location} cites; run {command} to measure again"
                )
        return gated
    cause = f" (the newest, {newest_difference})" if newest_difference else ""
    raise EvalError(
        f"no gate record fits {variant.name} in its present state{cause}; {command} makes one, and reports its verdict"
    )


def _changes(variant: Variant, record: Gate) -> list[str]:
    """Names of the binding circumstances that have changed since the record was made."""
    server = ServerCommand.resolve(variant)
    present = provenance.describe(
        server,
        ["slimqwen", "variant", "promote"],
        record.provenance.started,
        datasets=[
            variant.root / file for file in record.provenance.datasets if (variant.root / file).is_file()
        ],
    )
    return [
        each.name for each in differences.between(record.provenance, present) if each.circumstance in _BINDING
    ]


def _other_promoted(variant: Variant) -> Iterator[GatedVariant]:
    """The other promoted variants that serve the same checkpoint and whose newest gate record of it passed."""
    digest = checkpoint.digest(variant.weights)
    for name in variants.names(variant.root):
        folder = variant.root / "experiments" / name
        try:
            if name == variant.name or store.read_measurements(folder).status != _PROMOTED:
                continue
            other = variants.load(name, variant.root)
        except SlimqwenError:
            continue  # `slimqwen report --check` reports it
        if other.weights.resolve() != variant.weights.resolve():
            continue
        for path in store.records(folder, Gate):
            record = store.read(path, Gate)
            if record.split is None and record.provenance.checkpoint.digest == digest:
                if record.verdict == Verdict.PASS:
                    yield GatedVariant(other, path, record)
                break


def _render_card(gated: Sequence[GatedVariant]) -> str:
    """The card of the checkpoint that these variants serve; their order does not matter."""
    # Slow to import, and only promotion needs it.
    from huggingface_hub import EvalResult, ModelCard, ModelCardData

    gated = sorted(gated, key=lambda each: each.variant.name)
    folder = gated[0].variant.weights
    config = checkpoint.read_config(folder)
    owner, base = _origin(gated[0].variant)
    quantization = _quantization(config)
    tags = ["slimqwen", "vllm", config.get("model_type", "")]
    if quantization:
        tags += [quantization["method"], *(f"{bits}-bit" for bits in quantization["bits"])]
    on_hub = "/" in base
    data = ModelCardData(
        base_model=base,
        base_model_relation="quantized" if quantization else "finetune",
        license="other" if on_hub else "unknown",
        license_name=f"that of {base}" if on_hub else None,
        license_link=f"https://huggingface.co/{base}" if on_hub else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=tags,
        quantization=quantization,
        model_name=owner,
        eval_results=[EvalResult(**result) for each in gated for result in _results(each)],
    )
    files = gated[0].record.provenance.checkpoint
    description = recipe_file.read_recipe(
        gated[0].variant.root / "experiments" / owner / "recipe.yaml"
    ).description
    lines = [
        f"# {owner}",
        f"Made from {base} by Slimqwen: {description}",
        f"SHA-256 of the checkpoint `{files.digest}`, {files.size_bytes / 1e6:,.1f} MB; its last stage was "
        f"{checkpoint.Manifest.read(folder).stage}, `{MANIFEST}` beside this card lists every file.",
        *(paragraph for each in gated for paragraph in _section(each)),
    ]
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(lines) + "\n"))


def _origin(variant: Variant) -> tuple[str, str]:
    """The variant whose recipe made the checkpoint, and the recipe's first base: a hub repository, or a variant."""
    owner = name = _owner(variant)
    seen = set()
    while name not in seen:
        seen.add(name)
        file = variant.root / "experiments" / name / "recipe.yaml"
        if not file.is_file():
            source = variants.load(name, variant.root).settings.get("SOURCE")
            return owner, source.value if source and source.file.parent.name == name else name
        base = recipe_file.read_recipe(file).base
        if "/" in base:
            return owner, base
        name = _owner(variants.load(base, variant.root))
    return owner, name


def _owner(variant: Variant) -> str:
    """The variant that the folder under weights/ is named after."""
    return variant.weights.relative_to(variant.root / "weights").parts[0]


def _quantization(config: Mapping[str, Any]) -> dict[str, Any] | None:
    quantization = checkpoint.quantisation(config)
    if not quantization:
        return None
    # Only compressed-tensors has groups; FP8 does not say its bits.
    of_all = {"num_bits": quantization.get("bits", 8), "group_size": quantization.get("group_size")}
    of_all["symmetric"] = quantization.get("sym", not quantization.get("zero_point"))
    groups = quantization.get("config_groups", {}).values()
    weights = [group["weights"] for group in groups] or [of_all]
    return {
        "method": quantization["quant_method"],
        "format": quantization.get("format"),
        "bits": sorted({each["num_bits"] for each in weights}),
        "group_size": sorted({each["group_size"] for each in weights if each.get("group_size")}),
        "symmetric": all(each["symmetric"] for each in weights),
    }


def _results(gated: GatedVariant) -> Iterator[dict[str, Any]]:
    """The hub's evaluation results of a variant: its task scores, and its acceptance length."""
    name = gated.variant.name
    for path in gated.evidence:
        if path.parent.name != name or not path.name.startswith("quality_"):
            continue
        record = store.read(path, Quality)
        for task, score in record.tasks.items():
            yield {
                "task_type": "text-generation",
                "dataset_type": record.suite,
                "dataset_name": f"{record.suite}: {task}",
                "dataset_config": task,
                "metric_type": score.measure,
                "metric_name": f"{score.measure} of {name}",
                "metric_value": score.value,
                "metric_args": {
                    "standard_error": score.standard_error,
                    "items": score.item_count,
                    "record": f"{name}/{path.name}",
                },
            }
    for item in store.read_items(gated.path):
        if item["gate"] == "acceptance":
            yield {
                "task_type": "text-generation",
                "dataset_type": "acceptance",
                "dataset_name": f"acceptance: {gated.record.settings_name}",
                "metric_type": "acceptance_length_share",
                "metric_name": f"{item['figure']}, of {name}",
                "metric_value": item["value"],
                "metric_args": {
                    "low": item["low"],
                    "high": item["high"],
                    "record": f"{name}/{gated.path.name}",
                },
            }


def _section(gated: GatedVariant) -> Iterator[str]:
    variant, gate_provenance = gated.variant, gated.record.provenance
    yield f"## Served as {variant.name}"
    yield f"**Hypothesis.** {variant.hypothesis}"
    yield f"Promoted by the gate of {gate_provenance.ended[:10]} against {gated.record.baseline}:"
    for table in gated.record.tables(gated.path):
        yield table.as_markdown().rstrip()
    if not gate_provenance.hardware.gpus:
        yield "Measured on a CPU: no CPU figure is evidence about a GPU."
    flags = sorted(provenance.deciding(gate_provenance.flags).items())
    lines = "\n".join(f"{name}: {json.dumps(value)}" for name, value in flags if name != "model")
    yield f"`slimqwen serve --variant {variant.name}` serves it; the gate was passed with these flags of vLLM:"
    yield f"```\n{lines}\n```"
