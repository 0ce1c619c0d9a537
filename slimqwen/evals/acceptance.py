"""Acceptance: how many drafted tokens the model accepts, by draft depth, prompt class and temperature.

Each depth has an engine of its own. The prompts of a class are divided into groups, and groups are the units of every
interval, because the tokens of one continuation are not independent.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from slimqwen import checkpoint, host
from slimqwen import variant as variants
from slimqwen.evals import drafting, fidelity
from slimqwen.evals.drafting import AcceptanceSettings, Item
from slimqwen.evals.fidelity import Reference
from slimqwen.evals.invocation import Invocation
from slimqwen.records import provenance, store
from slimqwen.records.journal import journal_file, locked
from slimqwen.records.record import Block, Count, Estimate, Figure, NonNegative, Positive, Sha256, Table
from slimqwen.records.settings import SettingsName
from slimqwen.records.split import Split, SplitRecord
from slimqwen.serving import speed_only
from slimqwen.serving.command import ServerCommand
from slimqwen.stats import intervals
from slimqwen.text import prompts
from slimqwen.variant import Variant


class ClassAcceptance(Block):
    """Acceptance at one depth for one prompt class and temperature; estimates are over groups of prompts."""

    class_: str = Field(validation_alias="class", serialization_alias="class")
    temperature: NonNegative
    drafts: Count
    length: Estimate = Field(description="Acceptance length, 1 + accepted / drafts, tokens.")
    rates: tuple[Estimate, ...] = Field(description="Share of drafts accepted up to and with each position.")


class Depth(Block):
    """Acceptance at one draft depth."""

    depth: Positive = Field(description="Tokens drafted at a time (K).")
    length: Estimate = Field(description="Acceptance length of all greedy continuations, tokens.")
    settings: tuple[ClassAcceptance, ...]


class Acceptance(SplitRecord):
    """How many drafted tokens of a variant are accepted, by depth, prompt class and temperature."""

    kind = "acceptance"
    version = 4
    verb = "eval acceptance"
    deciding_flags = fidelity.WEIGHT_FLAGS
    leaderboard_columns: ClassVar[Mapping[str, str]] = {"acceptance_length": "acceptance length, tokens"}

    reference: Reference | None = Field(
        default=None,
        description="The baseline whose tokenizer cut the prompts; absent in old records.",
    )
    settings_name: SettingsName = Field(description="Name of the settings file in eval/gates/.")
    gate_depth: Positive = Field(description="The K at which the gate compares variant and baseline.")
    least_share: float = Field(description="Smallest share of the baseline's acceptance length that passes.")
    classes: dict[str, Positive] = Field(min_length=1, description="Longest prompt of each class, tokens.")
    prompts: Sha256 = Field(description="Digest of the prompts' token ids.")
    depths: tuple[Depth, ...] = Field(min_length=1)

    @property
    def basis(self) -> dict[str, Any]:
        """Properties that two records must share to be compared: settings, gate's K, side of the split, data files."""
        split = str(self.split or "of no split")
        own = {"settings": self.settings_name, "gate depth": self.gate_depth, "split": split}
        return own | super().basis

    def figures(self) -> Mapping[str, Figure]:
        """Every number of the record by name; `acceptance_length` is at the gate's K, else at the largest."""
        lengths = {row.depth: row.length for row in self.depths}
        length = lengths[self.gate_depth if self.gate_depth in lengths else max(lengths)]
        figure = Figure(length.value, "tokens", length.standard_error, count=length.count)
        return {**super().figures(), "acceptance_length": figure}

    def tables(self, path: Path) -> list[Table]:
        """One row per depth, class and temperature."""
        source = provenance.source_note(self, path)
        rows = [(row.depth, setting) for row in self.depths for setting in row.settings]
        columns: dict[str, Callable[[tuple[int, ClassAcceptance]], object]] = {
            "K": lambda row: row[0],
            "class": lambda row: row[1].class_,
            "temperature": lambda row: f"{row[1].temperature:g}",
            "acceptance length ± SE": lambda row: f"{row[1].length:.3f}",
            "accepted up to each position": lambda row: " ".join(f"{r.value:.2f}" for r in row[1].rates),
            "SE, at most": lambda row: f"{max(rate.standard_error for rate in row[1].rates):.2f}",
            "drafts": lambda row: row[1].drafts,
        }
        title = f"Acceptance of {self.variant}'s drafts"
        return [Table.from_rows(title, rows, columns, source, text_columns=2)]


def measure_acceptance(
    variant: Variant,
    settings: AcceptanceSettings,
    depths: Sequence[int],
    invocation: Invocation,
    *,
    greedy_only: bool = False,
) -> Path:
    """Measure the acceptance of a variant's drafts at several depths and write its acceptance record.

    Depths that an interrupted run has measured are not measured again.

    Args:
        variant: the variant; its checkpoint must have an MTP head.
        settings: prompts, temperatures and limits.
        depths: tokens drafted at a time (K).
        invocation: settings that all measurements of a command share.
        greedy_only: whether to leave out temperatures above 0.

    Returns:
        Path of the record.

    Raises:
        ServingError: the variant's weights are random, or a flag sets its acceptance length.
        MissingCheckpointError, CorruptCheckpointError: a checkpoint of variant or baseline is missing or damaged.
        EvalError: the checkpoint has no MTP head, the context is too short for a prompt, or the engine drafts nothing.
        CorpusError: the documents are missing, malformed or too few.
    """
    speed_only.refuse_speed_only(variant, "acceptance")
    started = provenance.utc_now()
    server = ServerCommand.resolve(variant)
    checkpoint.digest(variant.weights, invocation.progress)
    flags = fidelity.weight_flags(server.flags)
    temperatures = [each for each in settings.temperatures if not greedy_only or each == 0]
    classes = cut_class_prompts(variant, settings, max(depths), invocation.split)
    longest = {name: max(map(len, class_prompts)) for name, class_prompts in classes.items()}
    digest = prompts.digest([ids for class_prompts in classes.values() for ids in class_prompts])
    with locked(
        journal_file("acceptance", server, settings.model_dump(mode="json"), digest, temperatures)
    ) as journal:
        measure = partial(drafting.measure_drafts, variant.weights, classes, settings)
        items = [
            item
            for depth in depths
            for item in journal.answer(
                depth, partial(measure, depth, temperatures, flags, invocation.progress)
            )
        ]
        record = Acceptance(
            variant=variant.name,
            reference=Reference.of(variant, invocation.progress),
            settings_name=settings.name,
            split=invocation.split,
            gate_depth=settings.depth_of(variant),
            least_share=settings.least_share,
            classes=longest,
            prompts=digest,
            depths=summarise_items(items),
            provenance=provenance.describe(
                dataclasses.replace(
                    server, flags={**flags, "enforce-eager": host.detect() == "cpu"}, environment={}
                ),
                invocation.command,
                started,
                datasets=settings.inputs(variant.root),
                seeds={"prompts": settings.seed},
            ),
        )
        path = store.write_record(invocation.records_of(variant), record, items)
        journal.discard()
    return path


def cut_class_prompts(
    variant: Variant, settings: AcceptanceSettings, depth: int, split: Split | None = None
) -> dict[str, list[list[int]]]:
    """Cut prompts of each class from the settings' documents, short enough for drafts of up to `depth` tokens.

    Returns:
        Name of the class -> prompts in token ids of the variant; the baseline gets the same text.

    Raises:
        MissingCheckpointError, CorruptCheckpointError: a checkpoint of variant or baseline is missing or damaged.
        EvalError: the variant has no MTP head, or the context is too short for a prompt.
        CorpusError: the documents are missing, malformed or too few.
    """
    baseline = variants.load(variant.baseline, variant.root) if variant.baseline else variant
    for side in (variant, baseline):
        side.require_weights()
    drafting.require_mtp_head(variant)
    context_len = min(ServerCommand.resolve(side).max_model_len for side in (variant, baseline))
    return drafting.cut_prompts(settings, variant, baseline, context_len - settings.tokens - depth - 1, split)


def summarise_items(items: Sequence[Item]) -> tuple[Depth, ...]:
    """Estimate the figures of each depth from a record's items; groups of prompts are the independent observations."""
    rows = []
    for depth in dict.fromkeys(item["depth"] for item in items):
        depth_items = [item for item in items if item["depth"] == depth and item["drafts"]]
        by_setting: dict[tuple[str, float], list[Item]] = {}
        for item in depth_items:
            by_setting.setdefault((item["class"], item["temperature"]), []).append(item)
        rows.append(
            Depth(
                depth=depth,
                length=_length([item for item in depth_items if item["temperature"] == 0] or depth_items),
                settings=tuple(
                    ClassAcceptance(
                        class_=name,
                        temperature=temperature,
                        drafts=sum(item["drafts"] for item in group),
                        length=_length(group),
                        rates=tuple(_rate(group, position) for position in range(depth)),
                    )
                    for (name, temperature), group in by_setting.items()
                ),
            )
        )
    return tuple(rows)


def _length(items: Sequence[Item]) -> Estimate:
    return intervals.mean(*drafting.acceptance_lengths(items))


def _rate(items: Sequence[Item], position: int) -> Estimate:
    drafts = [item["drafts"] for item in items]
    return intervals.mean(
        [item["accepted_per_position"][position] / item["drafts"] for item in items], drafts
    )
