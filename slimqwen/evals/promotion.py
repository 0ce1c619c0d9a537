"""Promotion of a variant whose gate passed with its present checkpoint and flags: sets its status, writes a model card.

The card (`slimqwen.evals.model_card`) is README.md of a checkpoint that a recipe made; it counts in no digest.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slimqwen.checkpoint.files import CARD
from slimqwen.evals import EvalError
from slimqwen.evals.checks import GateSettings, Pair
from slimqwen.evals.gate import Gate
from slimqwen.evals.invocation import Invocation
from slimqwen.evals.model_card import render_card
from slimqwen.evals.preconditions import find_baseline
from slimqwen.progress import Progress, silent
from slimqwen.records import store
from slimqwen.records.record import MeasuredCheckpoint
from slimqwen.records.reuse import changed_inputs
from slimqwen.records.settings import SettingsError
from slimqwen.serving.command import ServerCommand
from slimqwen.stats.verdict import Verdict
from slimqwen.variant import Variant
from slimqwen.variant.claims import Claim


@dataclass(frozen=True)
class Promotion:
    """The outcome of a promotion.

    Attributes:
        gate: file of the gate record that passed.
        card: file of the model card; None where no recipe made the checkpoint.
        changed: whether a file was written; False if the variant had been promoted by this gate before.
    """

    gate: Path
    card: Path | None
    changed: bool


def promote_variant(
    variant: Variant, unproven: Mapping[Claim, str] | None = None, progress: Progress = silent
) -> Promotion:
    """Set a variant's status and write its model card, if its gate passed with its present checkpoint and flags.

    Args:
        unproven: what the variant claims and no record proves, with the reason. Without speed that it claims, it is not
            promoted.
        progress: receives (activity, done, total) where a checkpoint is hashed.

    Raises:
        EvalError: no gate record fits the present checkpoint and flags, the newest that fits has not passed, a record
            that it cites is missing, the variant is a baseline or was rejected, or it claims speed and no timing proves
            it. Nothing was changed.
    """
    if variant.baseline is None:
        raise EvalError(
            f"{variant.name} is a baseline and cannot be promoted; name a variant that was compared with it"
        )
    variant.require_weights()
    claims = store.read_measurements(variant.folder)
    if claims.status == "rejected":
        raise EvalError(
            f"{variant.name} was rejected; if that no longer holds, set its status in experiments/{variant.name}/"
            "measurements.json to measured first"
        )
    gate, record = find_passing_gate(variant, progress)
    if unproven and "speed" in unproven:
        raise EvalError(
            f"{variant.name} claims speed: {unproven['speed']}; or take `speed` out of `claims` in experiments/"
            f"{variant.name}/measurements.json"
        )
    changed, card = False, None
    if variant.weights.resolve().parent == (variant.root / "weights" / "store").resolve():
        card = variant.weights / CARD
        changed = _replace(card.parent.resolve() / CARD, render_card(variant, gate, record))
    # Records of an earlier checkpoint support nothing that is promoted now; those of another build of it do.
    names = {
        name for name in claims.records if _is_of_build(variant.folder / name, record.provenance.checkpoint)
    }
    names |= {path.name for path in [gate, *_evidence(variant, record)] if path.parent == variant.folder}
    update = {"status": "promoted", "verdict": Verdict.PASS, "records": tuple(sorted(names))}
    if (promoted := claims.model_copy(update=update)) != claims:
        text = json.dumps(promoted.as_json(), indent=2, ensure_ascii=False) + "\n"
        changed |= _replace(variant.folder / "measurements.json", text)
    return Promotion(gate, card, changed)


def _is_of_build(path: Path, gated: MeasuredCheckpoint) -> bool:
    measured = store.read_record(path).provenance.checkpoint
    return measured is not None and measured.has_recipe_of(gated)


def find_passing_gate(variant: Variant, progress: Progress) -> tuple[Path, Gate]:
    """Find the newest gate record that fits a variant's checkpoint, flags and settings, and check that it passed.

    Returns:
        Path and content of the record.

    Raises:
        EvalError: no record fits, the newest that fits has not passed, or a record that it cites is missing or
            outdated.
    """
    command = f"`slimqwen gate --variant {variant.name}`"
    pair, newest = Pair(variant, find_baseline(variant), Invocation((), progress=progress)), ""
    for path in store.records(variant.folder, Gate):
        record = store.read_record(path, Gate)
        if record.split:
            continue  # a search or its proof measured only some of the items
        try:
            settings = GateSettings.load(record.settings_name, variant.root)
        except SettingsError:
            newest = newest or f" (the newest, {path.name}, has other settings)"
            continue
        changes = changed_inputs(
            record.provenance,
            ServerCommand.resolve(variant),
            files=settings.files(variant.root),
            on_any_machine=True,
            progress=progress,
        )
        checks = settings.checks(pair)
        changes += ["baseline"] if record.baseline != pair.baseline.name else []
        changes += ["checks"] if record.verdicts.keys() != checks.keys() else []
        if changes:
            newest = newest or f" (the newest, {path.name}, has other {' and '.join(changes)})"
            continue
        location = f"{variant.name}/{path.name}"
        if record.verdict != Verdict.PASS:
            failed = ", ".join(
                f"{check}: {verdict}" for check, verdict in record.verdicts.items() if verdict != Verdict.PASS
            )
            inconclusive = record.verdict == Verdict.INCONCLUSIVE
            cure = (
                f"run {command}, which says what would decide"
                if inconclusive
                else f"change its recipe or flags, run {command}"
            )
            raise EvalError(
                f"the newest gate record of {variant.name} in its present state says {record.verdict} "
                f"({failed}; {location}); {cure}, and promote it when that passes"
            )
        pair.baseline.require_weights()  # half of the evidence is of them
        for cited in _evidence(variant, record):
            shown = f"{cited.parent.name}/{cited.name}, which {location} cites,"
            if not cited.is_file():
                raise EvalError(f"{shown} is missing; run {command} to measure again")
            (side,) = (each for each in pair.sides if each.name == cited.parent.name)
            found = store.read_record(cited)
            (check,) = (each for each in checks.values() if isinstance(found, each.kind))
            if changes := check.changed_since(found, side):
                raise EvalError(
                    f"{shown} was measured with other {' and '.join(changes)}; run {command} to measure again"
                )
        return path, record
    raise EvalError(
        f"no gate record fits {variant.name} in its present state{newest}; run {command} to make one"
    )


def _evidence(variant: Variant, record: Gate) -> list[Path]:
    return record.evidence(variant.root / "experiments")


def _replace(file: Path, text: str) -> bool:
    """Write a file if its text differs from `text`; returns whether it was written."""
    if file.is_file() and file.read_text(encoding="utf-8") == text:
        return False
    store.publish(file, text.encode(), replace=True)
    return True
