"""Gate sensitivity: does the gate catch damage, and how often does it fail an undamaged variant?

Each kind of damage is made with many seeds; the check responsible for it evaluates every damaged copy. False alarms
are counted on the baseline compared with itself: its figures in two batch compositions, resampled.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from slimqwen.evals import acceptance_share, damage, drafting, gate, quality_comparison
from slimqwen.evals.acceptance_share import Share
from slimqwen.evals.damage import Damage
from slimqwen.evals.drafting import AcceptanceSettings, Item
from slimqwen.evals.fidelity import weight_flags
from slimqwen.evals.fidelity_figures import MODES, FidelitySettings, judge, summarise
from slimqwen.evals.gate import GateSettings
from slimqwen.evals.quality import Quality
from slimqwen.progress import Progress, silent
from slimqwen.records import provenance, store
from slimqwen.records.journal import journal_file, locked
from slimqwen.records.record import Block, Count, NonNegative, Positive, Record, Table
from slimqwen.records.record import Share as ShareOfOne
from slimqwen.serving.command import ServerCommand
from slimqwen.stats import intervals
from slimqwen.stats.verdict import Verdict, overall
from slimqwen.variant import Variant

STATED_FALSE_ALARM_RATE = round(1 - intervals.CONFIDENCE_LEVEL, 6)
"""Largest rate at which a check may fail an identical variant, by the confidence level of its intervals."""

REPLICATES = 200

_Check = Callable[[Path], "Reading"]
"""What a check says of a checkpoint."""

_Replicate = Callable[[np.random.Generator], list[Verdict]]
"""The verdicts of a check on a bootstrap sample of the baseline compared with itself."""

RESPONSIBLE = {Damage.SCALES: "fidelity", Damage.ROWS: "fidelity", Damage.HEAD: "acceptance"}

_VALUE = Field(
    description="Mean KL in nats a token (fidelity), or the share of the baseline's acceptance length."
)


class Reading(Block):
    """What a check says of a checkpoint."""

    value: float = _VALUE
    verdict: Verdict


class DamagedReading(Block):
    """What a check says of a checkpoint that was damaged with one seed."""

    seed: int
    target: str = Field(
        min_length=1,
        description="Damaged layer or tensor.",
        validation_alias="place",
        serialization_alias="place",
    )
    value: float = _VALUE
    verdict: Verdict


class DamageReadings(Block):
    """What the check responsible for a kind of damage says of all damaged copies."""

    damage: str = Field(min_length=1)
    gate: str = Field(min_length=1, description="The responsible check.")
    caught: Count
    copies: Count = Field(validation_alias="of", serialization_alias="of")
    rows: tuple[DamagedReading, ...]


class FalseAlarms(Block):
    """How often a check fails the baseline compared with itself, resampled."""

    gate: str = Field(min_length=1)
    replicates: Positive
    failed: Count
    inconclusive: Count
    rate: ShareOfOne
    stated: ShareOfOne = Field(description="Largest rate that the check promises.")
    verdict: Verdict


class GatePower(Record):
    """Whether the gate catches damage of a variant's checkpoint, and how often it raises a false alarm."""

    kind = "gate_power"
    verb = "gate sensitivity"

    seeds: tuple[int, ...] = Field(description="Of each kind of damage.")
    undamaged: dict[str, Reading] = Field(description="By check.")
    damages: tuple[DamageReadings, ...]
    false_alarms: tuple[FalseAlarms, ...]
    scale_sigma: NonNegative
    swapped_share: ShareOfOne

    @property
    def verdict(self) -> Verdict:
        """Pass where every damaged copy was caught and false alarms are as rare as stated."""
        caught = all(row.caught == row.copies for row in self.damages)
        rare = all(row.verdict == Verdict.PASS for row in self.false_alarms)
        return Verdict.PASS if caught and rare else Verdict.FAIL

    def tables(self, path: Path) -> list[Table]:
        """One row per kind of damage; then one row per check with false alarms."""
        damages: dict[str, Callable[[DamageReadings], object]] = {
            "damage": lambda row: row.damage,
            "check": lambda row: row.gate,
            "caught": lambda row: row.caught,
            "copies": lambda row: row.copies,
            "smallest": lambda row: f"{min(reading.value for reading in row.rows):.5f}",
            "largest": lambda row: f"{max(reading.value for reading in row.rows):.5f}",
            "undamaged": lambda row: f"{self.undamaged[row.gate].value:.5f}",
        }
        alarms: dict[str, Callable[[FalseAlarms], object]] = {
            "check": lambda row: row.gate,
            "failed": lambda row: row.failed,
            "inconclusive": lambda row: row.inconclusive,
            "replicates": lambda row: row.replicates,
            "rate": lambda row: f"{row.rate:.3f}",
            "stated, at most": lambda row: f"{row.stated:.2f}",
        }
        title = f"Damage of {self.variant} that the gate catches"
        return [
            Table.from_rows(title, self.damages, damages, text_columns=2),
            Table.from_rows("False alarms: the baseline compared with itself", self.false_alarms, alarms),
        ]


def measure(
    variant: Variant,
    settings_name: str,
    seeds: Sequence[int],
    rebatched: Variant | None,
    *,
    command: Sequence[str],
    progress: Progress = silent,
) -> Path:
    """Damage a variant's checkpoint with every seed, count false alarms on its baseline, and write the record.

    Copies that an interrupted run has checked are not checked again.

    Args:
        variant: quantised variant with an MTP head, and a baseline.
        rebatched: variant with the baseline's weights, other batch sizes and a quality record on the same items;
            None leaves out quality's false alarms.

    Raises:
        EvalError: the variant has no baseline, or nothing to damage.
    """
    started = provenance.utc_now()
    baseline = gate.baseline_of(variant)
    settings = GateSettings.of_variant(variant, settings_name)
    fidelity = FidelitySettings.load(settings.fidelity, variant.root)
    acceptance = AcceptanceSettings.load(settings.acceptance, variant.root)
    checks = {
        "fidelity": _fidelity_check(variant, baseline, fidelity),
        "acceptance": _acceptance_check(variant, baseline, acceptance),
    }
    inputs = [settings_name, *(each.model_dump(mode="json") for each in (fidelity, acceptance))]
    damages = []
    with locked(journal_file("gate_power", ServerCommand.resolve(variant), *inputs)) as journal:

        def check(name: str, key: Sequence[Any], weights: Path) -> Reading:
            return Reading.model_validate(journal.answer(key, lambda: checks[name](weights).as_json()))

        undamaged = {name: check(name, [name], variant.weights.resolve()) for name in checks}
        for kind, name in RESPONSIBLE.items():
            rows = []
            activity = f"{kind}, checked by {name}"
            for done, seed in enumerate(seeds):
                progress(activity, done, len(seeds))
                with tempfile.TemporaryDirectory() as folder:
                    target = damage.damage(variant.weights.resolve(), Path(folder), kind, seed)
                    reading = check(name, [kind, seed], Path(folder))
                rows.append(DamagedReading(seed=seed, target=target, **dict(reading)))
            progress(activity, len(seeds), len(seeds))
            caught = sum(row.verdict == Verdict.FAIL for row in rows)
            damages.append(
                DamageReadings(damage=kind, gate=name, caught=caught, copies=len(rows), rows=tuple(rows))
            )
        record = GatePower(
            variant=variant.name,
            seeds=tuple(seeds),
            undamaged=undamaged,
            damages=tuple(damages),
            false_alarms=tuple(false_alarms(baseline, fidelity, acceptance, rebatched, progress)),
            scale_sigma=damage.SCALE_SIGMA,
            swapped_share=damage.SWAPPED_SHARE,
            provenance=provenance.of_variant(variant, command, started),
        )
        path = store.write(variant.root / "results", record)
        journal.discard()
    return path


def false_alarms(
    baseline: Variant,
    fidelity: FidelitySettings,
    acceptance: AcceptanceSettings,
    rebatched: Variant | None,
    progress: Progress = silent,
) -> list[FalseAlarms]:
    """How often each check fails the baseline compared with itself, over resampled texts, groups and items.

    Args:
        baseline: the baseline, evaluated in two batch compositions.
        rebatched: as for `measure`.
    """
    replicates = {
        "fidelity": _resampled_fidelity(baseline, fidelity, progress),
        "acceptance": _resampled_acceptance(baseline, acceptance),
    }
    if rebatched is not None:
        replicates["quality"] = _resampled_quality(baseline, rebatched)
    rows = []
    for name, replicate in replicates.items():
        rng = np.random.default_rng(intervals.BOOTSTRAP_SEED)
        verdicts = []
        for done in range(REPLICATES):
            progress(f"false alarms of {name}", done, REPLICATES)
            verdicts.append(overall(replicate(rng)))
        progress(f"false alarms of {name}", REPLICATES, REPLICATES)
        failed = verdicts.count(Verdict.FAIL)
        rate = failed / REPLICATES
        rows.append(
            FalseAlarms(
                gate=name,
                replicates=REPLICATES,
                failed=failed,
                inconclusive=verdicts.count(Verdict.INCONCLUSIVE),
                rate=rate,
                stated=STATED_FALSE_ALARM_RATE,
                verdict=Verdict.PASS if rate <= STATED_FALSE_ALARM_RATE else Verdict.FAIL,
            )
        )
    return rows


def _resampled_fidelity(baseline: Variant, settings: FidelitySettings, progress: Progress) -> _Replicate:
    from slimqwen.evals import token_distributions

    texts = token_distributions.compare(
        baseline.weights,
        baseline.weights,
        settings,
        baseline.root,
        max_model_len=ServerCommand.resolve(baseline).max_model_len,
        progress=progress,
    )
    by_mode = {mode: [text for text in texts if text.mode == mode] for mode in MODES}

    def replicate(rng: np.random.Generator) -> list[Verdict]:
        verdicts: list[Verdict] = []
        for mode, mode_texts in by_mode.items():
            sample = [mode_texts[number] for number in rng.integers(len(mode_texts), size=len(mode_texts))]
            verdicts += judge(summarise(sample)[mode], settings.limits.same_weights).values()
        return verdicts

    return replicate


def _resampled_acceptance(baseline: Variant, settings: AcceptanceSettings) -> _Replicate:
    sides = [
        _count_drafts(baseline.weights, baseline, baseline, settings, {"max-num-seqs": batch_size})
        for batch_size in (1, 32)
    ]

    def replicate(rng: np.random.Generator) -> list[Verdict]:
        numbers = rng.integers(len(sides[0]), size=len(sides[0]))
        first, second = (
            [{**side[number], "group": group} for group, number in enumerate(numbers)] for side in sides
        )
        return [_share(first, second, settings).verdict]

    return replicate


def _resampled_quality(baseline: Variant, rebatched: Variant) -> _Replicate:
    paths = quality_comparison.pair(baseline.folder, rebatched.folder)
    record = store.read(paths[0], Quality)
    sides = [quality_comparison.items_by_task(path) for path in paths]

    def replicate(rng: np.random.Generator) -> list[Verdict]:
        verdicts = []
        for task, score in record.tasks.items():
            numbers = rng.integers(len(sides[0][task]), size=len(sides[0][task]))
            first, second = (
                [
                    {**side[task][number], "item": str(item), "cluster": None}
                    for item, number in enumerate(numbers)
                ]
                for side in sides
            )
            row = quality_comparison.compare_items(task, score, score.value, first, second)
            verdicts.append(row.judgement.verdict)
        return verdicts

    return replicate


def _fidelity_check(variant: Variant, baseline: Variant, settings: FidelitySettings) -> _Check:
    """Mean KL in nats a token; the verdict is that of all figures of texts read one at a time, and of the layers."""
    from slimqwen.evals import layer_error, token_distributions

    server = ServerCommand.resolve(variant)

    def check(weights: Path) -> Reading:
        texts = token_distributions.compare(
            weights,
            baseline.weights,
            settings,
            variant.root,
            max_model_len=server.max_model_len,
            flags=weight_flags(server.flags),
            modes=["single"],
        )
        figures = summarise(texts)["single"]
        verdicts = list(judge(figures, settings.limits.changed_weights).values())
        layers = layer_error.compare(weights, baseline.weights, settings, variant.root)
        if layers:
            verdicts.append(layers.verdict)
        assert figures.kl_nats is not None, "the settings name two texts or more"
        return Reading(value=figures.kl_nats.value, verdict=overall(verdicts))

    return check


def _acceptance_check(variant: Variant, baseline: Variant, settings: AcceptanceSettings) -> _Check:
    """The acceptance length as a share of the baseline's, and its verdict."""

    @cache
    def baseline_items() -> list[dict[str, Any]]:
        return _count_drafts(baseline.weights, baseline, baseline, settings)

    def check(weights: Path) -> Reading:
        share = _share(baseline_items(), _count_drafts(weights, variant, baseline, settings), settings)
        return Reading(value=share.ratio.value, verdict=share.verdict)

    return check


def _share(first: Sequence[Item], second: Sequence[Item], settings: AcceptanceSettings) -> Share:
    depth, least_share = settings.gate_depth, settings.least_share
    return acceptance_share.judge(first, second, depth=depth, least_share=least_share)


def _count_drafts(
    weights: Path,
    variant: Variant,
    baseline: Variant,
    settings: AcceptanceSettings,
    flags: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Items of greedy continuations at the gate's depth; `weights` replaces the variant's own checkpoint."""
    server = ServerCommand.resolve(variant)
    max_tokens = server.max_model_len - settings.tokens - settings.gate_depth - 1
    classes = drafting.cut_prompts(settings, variant, baseline, max_tokens)
    all_flags = {**weight_flags(server.flags), **(flags or {})}
    return drafting.count(weights, classes, settings, [settings.gate_depth], [0.0], all_flags)
