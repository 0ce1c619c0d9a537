"""The four checks of a gate: their settings, and functions that measure a check or find a record that still holds."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal, Self, get_args

from slimqwen.checkpoint.weights import has_mtp_head
from slimqwen.evals import acceptance, engine, fidelity, quality
from slimqwen.evals.acceptance import Acceptance
from slimqwen.evals.drafting import AcceptanceSettings
from slimqwen.evals.engine import EngineCheck
from slimqwen.evals.engine_process import EngineSettings
from slimqwen.evals.fidelity import Fidelity
from slimqwen.evals.fidelity_figures import FidelitySettings
from slimqwen.evals.preconditions import find_baseline
from slimqwen.evals.quality import Quality
from slimqwen.evals.runaways import ResponseLimits
from slimqwen.evals.suites import scorer
from slimqwen.evals.suites.suite import AUTO, Limit, Suite
from slimqwen.progress import Progress, silent
from slimqwen.records.reuse import find_reusable
from slimqwen.records.settings import Settings, SettingsError
from slimqwen.records.split import Side, Split
from slimqwen.variant import Variant

Check = Literal["fidelity", "acceptance", "quality", "engine"]
CHECKS: tuple[Check, ...] = get_args(Check)


class GateSettings(Settings):
    """eval/gates/<name>.yaml: a section of settings for each check, and the limits of responses that run away.

    Attributes:
        quality: name of a suite of eval/suites/, or of an own evaluation.
    """

    folder: ClassVar[str] = "gates"
    own_file: ClassVar[str] = "gate"

    fidelity: FidelitySettings
    acceptance: AcceptanceSettings
    engine: EngineSettings
    responses: ResponseLimits
    quality: str

    def split(self, side: Side | None, root: Path) -> Split | None:
        """The named side of the suite's split; None for all items."""
        return Suite.load(self.quality, root).split(side) if side else None


def find_response_limits(suite: str, root: Path) -> ResponseLimits | None:
    """The limits of the gate that is named like a suite; None if there is no such gate or it cannot be read."""
    try:
        return GateSettings.load(suite, root).responses
    except SettingsError:
        return None


@dataclass(frozen=True)
class GateChecks:
    """The checks of a variant against its baseline.

    Attributes:
        command: program and arguments of the measurement, for the records.
        folder: experiments/ or its equivalent, with a folder of records for each variant.
        split: side of the split whose items are measured; None for both sides.
        port: TCP port of servers instead of the variants' own.
    """

    variant: Variant
    baseline: Variant
    settings: GateSettings
    command: Sequence[str]
    folder: Path
    split: Split | None
    port: int | None
    progress: Progress

    @classmethod
    def load(
        cls,
        variant: Variant,
        settings_name: str,
        *,
        command: Sequence[str],
        folder: str = "experiments",
        split_side: Side | None = None,
        port: int | None = None,
        progress: Progress = silent,
    ) -> Self:
        """Read the settings file of that name and make the checks of a variant.

        Args:
            folder: folder with a folder of records for each variant, relative to the repository.

        Raises:
            SettingsError: the settings are missing or cannot be used.
            EvalError: the variant has no baseline.
        """
        settings, root = GateSettings.load(settings_name, variant.root), variant.root
        baseline, split = find_baseline(variant), settings.split(split_side, root)
        return cls(variant, baseline, settings, command, root / folder, split, port, progress)

    @property
    def sides(self) -> tuple[Variant, Variant]:
        """The baseline and the variant."""
        return self.baseline, self.variant

    @cached_property
    def suite(self) -> Suite:
        """The suite of the quality check."""
        return Suite.load(self.settings.quality, self.variant.root)

    @cached_property
    def depth(self) -> int:
        """The K at which the drafts of both sides are compared."""
        return self.settings.acceptance.depth_of(self.variant)

    @property
    def has_drafts(self) -> bool:
        """Whether the checkpoint of the baseline or of the variant has an MTP head."""
        return any(has_mtp_head(side.weights) for side in self.sides)

    def list_measurements(self) -> list[tuple[Check, Variant]]:
        """List the measurements that the gate needs: pairs of check and side, the baseline before the variant."""
        drafting = self.sides if self.has_drafts else ()
        return [
            ("fidelity", self.variant),
            *(("acceptance", side) for side in drafting),
            *(("quality", side) for side in self.sides),
            ("engine", self.variant),
        ]

    def find(self, check: Check, side: Variant, limit: Limit = AUTO) -> Path | None:
        """Find the newest record of a check that still holds, so that a new measurement would only repeat it.

        Args:
            side: the baseline or the variant.
            limit: items of each task, for quality.
        """
        name, folder = self.settings.name, self.folder / side.name
        if check == "fidelity":
            return find_reusable(side, Fidelity, folder, self.split, lambda each: each.settings_name == name)
        if check == "acceptance":
            wanted = name, self.depth
            return find_reusable(
                side,
                Acceptance,
                folder,
                self.split,
                lambda each: (each.settings_name, each.gate_depth) == wanted,
            )
        if check == "quality":
            return find_reusable(
                side, Quality, folder, self.split, lambda each: _is_sample(each, self.suite, limit)
            )
        return find_reusable(side, EngineCheck, folder, None, lambda each: each.settings_name == name)

    def measure(self, check: Check, side: Variant, limit: Limit = AUTO) -> Path:
        """Measure a check of the baseline or the variant and write its record; raises what the check raises."""
        name, folder, split = self.settings.name, self.folder / side.name, self.split
        command, progress = self.command, self.progress
        if check == "fidelity":
            return fidelity.measure_fidelity(
                side,
                name,
                command=command,
                split=split,
                port=self.port,
                records_folder=folder,
                progress=progress,
            )
        if check == "acceptance":
            return acceptance.measure_acceptance(
                side,
                name,
                [self.depth],
                command=command,
                gate_depth=self.depth,
                greedy_only=True,
                split=split,
                records_folder=folder,
                progress=progress,
            )
        if check == "quality":
            return quality.measure_quality(
                side,
                self.suite,
                command=command,
                limit=limit,
                split=split,
                port=self.port,
                records_folder=folder,
                progress=progress,
            )
        return engine.measure_engine(side, name, command=command, records_folder=folder, progress=progress)


def _is_sample(record: Quality, suite: Suite, limit: Limit) -> bool:
    """Whether a record has this suite, limit and scorer; for AUTO, also the sample sizes of the present assumptions.

    Of an own evaluation every setting that changes a response or a score must be as it is now.
    """
    for task in suite.tasks:
        settings = record.tasks[task.name].settings if task.name in record.tasks else {}
        if suite.questions and settings != task.settings(rendered=suite.chat_template) | suite.scoring:
            return False
        if settings.get("scorer", scorer.digest()) != scorer.digest():
            return False
    return (record.suite, record.limit) == (suite.name, limit) and (
        limit != AUTO
        or all(
            record.tasks[task.name].items_to_decide == task.items_to_decide
            for task in suite.tasks
            if task.name in record.tasks
        )
    )
