"""Promotion: a variant whose gate passed on what would be served now, and the model card that says so.

A card lies in the checkpoint as README.md, in the form of the model hub, and is no part of it to manifest and digest.
It is written only into what a recipe made; a checkpoint that several promoted variants serve has one card on all of
them, so that it is true whichever of them is asked about.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimqwen import checkpoint
from slimqwen import variant as variants
from slimqwen.errors import SlimqwenError
from slimqwen.evaluation.verdict import Verdict
from slimqwen.recipe import recipe_file
from slimqwen.records import differences, provenance, store
from slimqwen.records.differences import Of
from slimqwen.report import tables
from slimqwen.serving import launch
from slimqwen.variant import Variant

_PROMOTED = "promoted"
_BINDING = (Of.CHECKPOINT, Of.DATA, Of.FLAGS, Of.PACKAGES)
"""What a gate record must share with what would be served now; another machine or commit serves the same variant."""


class PromotionError(SlimqwenError):
    """A variant that is not to be promoted; nothing was changed."""


@dataclass(frozen=True)
class Promotion:
    """How a promotion came out.

    Attributes:
        gate: the record that it rests on.
        card: the model card; None where the checkpoint is no recipe's, and is left as it is.
        changed: False where everything was as it should be already.
    """

    gate: Path
    card: Path | None
    changed: bool


@dataclass(frozen=True)
class _Promoted:
    """A variant and the gate record that it was promoted by."""

    variant: Variant
    gate: Path
    record: store.Record


def promote(one: Variant) -> Promotion:
    """Set a variant's status and write its checkpoint's card, if its gate passed on what would be served now.

    Raises:
        PromotionError: no gate record speaks of the present checkpoint and flags, the newest that does has not
            passed, a record that it rests on is missing, or the variant is a baseline or was rejected.
        SlimqwenError: the checkpoint is missing, or a record is damaged.
    """
    if one.baseline is None:
        raise PromotionError(f"{one.name} is a baseline: promoted is what was held against one")
    checkpoint.check(one.weights, variants.making_command(one.weights, one.root))
    claimed = store.read_measurements(one.folder)
    if claimed["status"] == "rejected":
        raise PromotionError(
            f"{one.name} was rejected; if that no longer holds, set its status in experiments/{one.name}/"
            "measurements.json to measured first"
        )
    promoted = _passed(one)
    evidence = [path for path in _evidence(promoted) if path.parent == one.folder]
    names = {promoted.gate.name, *(path.name for path in evidence)}
    digest = promoted.record["provenance"]["checkpoint"]["digest"]
    # Records of an earlier checkpoint support nothing that is promoted now.
    kept = {
        name
        for name in claimed["records"]
        if store.read(one.folder / name)["provenance"]["checkpoint"]["digest"] == digest
    }
    settled = claimed | {
        "status": _PROMOTED,
        "verdict": Verdict.PASS.value,
        "records": sorted(kept | names),
    }
    folder, card = one.weights.resolve(), None
    changed = claimed != settled
    weights = one.root / "weights"
    if one.weights.parent == weights and folder.parent == (weights / "store").resolve():
        card = folder / checkpoint.CARD
        text = _card([promoted, *_others(one)])
        if not card.is_file() or card.read_text(encoding="utf-8") != text:
            store.publish(card, text.encode(), replace=True)
            changed = True
    if claimed != settled:
        place = f"experiments/{one.name}/measurements.json"
        store.validate(settled, place)
        text = json.dumps(settled, indent=2, ensure_ascii=False) + "\n"
        store.publish(one.root / place, text.encode(), replace=True)
    return Promotion(promoted.gate, card and one.weights / checkpoint.CARD, changed)


def _passed(one: Variant) -> _Promoted:
    """The newest gate record that speaks of what would be served now, if it passed."""
    command = f"`make gate VARIANT={one.name}`"
    newest = None
    for path in store.records(one.folder, "gate"):
        record = store.read(path)
        foreign = _foreign(one, record)
        if foreign:
            newest = newest or f"{path.name} differs in {', '.join(foreign)}"
            continue
        if record["verdict"] != Verdict.PASS:
            witnesses = ", ".join(
                f"{name}: {verdict}"
                for name, verdict in record["verdicts"].items()
                if verdict != Verdict.PASS
            )
            raise PromotionError(
                f"the newest gate of {one.name} as it is now says {record['verdict']} ({witnesses}; "
                f"{one.name}/{path.name}); mend that, and promote after {command} passes"
            )
        promoted = _Promoted(one, path, record)
        for needed in _evidence(promoted):
            if not needed.is_file():
                raise PromotionError(
                    f"{needed.parent.name}/{needed.name} is missing, and {one.name}/{path.name} rests on it; "
                    f"`git checkout` restores a committed one, else {command}"
                )
            if changed := provenance.changed_data(store.read(needed)["provenance"], one.root):
                raise PromotionError(
                    f"{changed[0]} has changed since {needed.parent.name}/{needed.name}, and {one.name}/{path.name} "
                    f"rests on it; {command} measures again"
                )
        return promoted
    found = f" (the newest, {newest})" if newest else ""
    raise PromotionError(
        f"no gate record speaks of {one.name} as it is now{found}; {command} makes one, and says whether it passes"
    )


def _foreign(one: Variant, record: store.Record) -> list[str]:
    """What was otherwise when the record was made, of what binds it to a variant."""
    served = launch.resolve(one)
    block = record["provenance"]
    present = provenance.describe(
        root=one.root,
        command=[],
        started=block["started"],
        flags=served.flags,
        environment=served.environment,
        weights=one.weights,
        datasets=[one.root / file for file in block["datasets"] if (one.root / file).is_file()],
        seeds={},
        server="started",
    )
    return [each.name for each in differences.between(block, present) if each.of in _BINDING]


def _evidence(promoted: _Promoted) -> list[Path]:
    """The records that a gate record rests on."""
    return [promoted.variant.root / "experiments" / place for place in promoted.record["records"]]


def _others(one: Variant) -> Iterator[_Promoted]:
    """The other promoted variants that serve the same checkpoint and whose newest gate record of it passed."""
    digest = checkpoint.digest(one.weights)
    for name in variants.names(one.root):
        folder = one.root / "experiments" / name
        try:
            if name == one.name or store.read_measurements(folder)["status"] != _PROMOTED:
                continue
            other = variants.load(name, one.root)
        except SlimqwenError:
            continue  # `make check-records` names it; it is none of this one's business
        if other.weights.resolve() != one.weights.resolve():
            continue
        for path in store.records(folder, "gate"):
            record = store.read(path)
            if record["provenance"]["checkpoint"]["digest"] == digest:
                if record["verdict"] == Verdict.PASS:
                    yield _Promoted(other, path, record)
                break


def _card(promoted: list[_Promoted]) -> str:
    """The same text for the same variants and records, in whatever order they were promoted."""
    # Heavy: paid by promotion alone.
    from huggingface_hub import EvalResult, ModelCard, ModelCardData

    promoted = sorted(promoted, key=lambda each: each.variant.name)
    folder = promoted[0].variant.weights
    config = checkpoint.read_config(folder)
    owner, base = _origin(promoted[0].variant)
    quantization = _quantization(config)
    own = quantization or {}
    on_hub = "/" in base
    data = ModelCardData(
        base_model=base,
        base_model_relation="quantized" if quantization else "finetune",
        license="other" if on_hub else "unknown",
        license_name=f"that of {base}" if on_hub else None,
        license_link=f"https://huggingface.co/{base}" if on_hub else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=[
            "slimqwen",
            "vllm",
            config.get("model_type", ""),
            *([own["method"], f"{own['bits']}-bit"] if own else []),
        ],
        quantization=quantization,
        model_name=owner,
        eval_results=[EvalResult(**result) for each in promoted for result in _results(each)],
    )
    block = promoted[0].record["provenance"]["checkpoint"]
    manifest = checkpoint.Manifest.read(folder)
    lines = [
        f"# {owner}",
        f"Made from {base} by Slimqwen: {_description(promoted[0].variant.root, owner)}",
        f"SHA-256 of the checkpoint `{block['digest']}`, {block['size_bytes'] / 1e6:,.1f} MB; its last stage was "
        f"{manifest.stage}, `{checkpoint.MANIFEST}` beside this card lists every file.",
        *(paragraph for each in promoted for paragraph in _section(each)),
    ]
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(lines) + "\n"))


def _origin(one: Variant) -> tuple[str, str]:
    """The variant whose recipe made the checkpoint, and what that began with: a hub repository, or a variant here."""
    owner = name = _owner(one)
    seen = set()
    while name not in seen:
        seen.add(name)
        file = one.root / "experiments" / name / "recipe.yaml"
        if not file.is_file():
            source = variants.load(name, one.root).settings.get("SOURCE")
            return owner, source.value if source and source.file.parent.name == name else name
        base = recipe_file.read(file).base
        if "/" in base:
            return owner, base
        name = _owner(variants.load(base, one.root))
    return owner, name


def _owner(one: Variant) -> str:
    """The variant that the folder under weights/ is named after."""
    return one.weights.relative_to(one.root / "weights").parts[0]


def _description(root: Path, owner: str) -> str:
    return recipe_file.read(root / "experiments" / owner / "recipe.yaml").description


def _quantization(config: dict[str, Any]) -> dict[str, Any] | None:
    found = config.get("quantization_config")
    groups = list((found or {}).get("config_groups", {}).values())
    if not found or not groups:
        return None
    weights = groups[0]["weights"]
    return {
        "method": found["quant_method"],
        "format": found.get("format"),
        "bits": weights["num_bits"],
        "group_size": weights["group_size"],
        "symmetric": weights["symmetric"],
    }


def _results(promoted: _Promoted) -> Iterator[dict[str, Any]]:
    """What the records behind the gate say of the variant itself, as the hub's evaluation results."""
    name = promoted.variant.name
    for path in _evidence(promoted):
        if path.parent.name != name:
            continue
        record = store.read(path)
        if record["schema"].startswith("quality/"):
            for task, row in record["tasks"].items():
                yield {
                    "task_type": "text-generation",
                    "dataset_type": record["suite"],
                    "dataset_name": f"{record['suite']}: {task}",
                    "dataset_config": task,
                    "metric_type": row["measure"],
                    "metric_name": f"{row['measure']} of {name}",
                    "metric_value": row["value"],
                    "metric_args": {
                        "standard_error": row["standard_error"],
                        "items": row["item_count"],
                        "record": f"{name}/{path.name}",
                    },
                }
    for item in store.read_items(promoted.gate):
        if item["gate"] == "acceptance":
            yield {
                "task_type": "text-generation",
                "dataset_type": "acceptance",
                "dataset_name": f"acceptance: {promoted.record['plan']}",
                "metric_type": "acceptance_length_share",
                "metric_name": f"{item['figure']}, of {name}",
                "metric_value": item["value"],
                "metric_args": {
                    "low": item["low"],
                    "high": item["high"],
                    "record": f"{name}/{promoted.gate.name}",
                },
            }


def _section(promoted: _Promoted) -> Iterator[str]:
    one, block = promoted.variant, promoted.record["provenance"]
    yield f"## Served as {one.name}"
    yield f"**Hypothesis.** {one.hypothesis}"
    yield f"Promoted by the gate of {block['ended'][:10]} against {promoted.record['baseline']}:"
    yield tables.gate_table(promoted.gate).as_markdown().rstrip()
    if not block["hardware"]["gpus"]:
        yield "Measured on a CPU: no CPU figure is evidence about a GPU."
    flags = sorted(provenance.deciding(block["flags"]).items())
    lines = "\n".join(f"{name}: {json.dumps(value)}" for name, value in flags if name != "model")
    yield f"`make serve VARIANT={one.name}` serves it; the gate was passed with these flags of vLLM:"
    yield f"```\n{lines}\n```"
