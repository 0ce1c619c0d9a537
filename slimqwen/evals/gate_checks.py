"""The four checks of a gate: their settings, and functions that measure a check or find a record that still holds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Literal, Self, get_args

from slimqwen.checkpoint.weights import has_mtp_head
from slimqwen.evals import acceptance, engine, fidelity, quality
from slimqwen.evals.acceptance import Acceptance
from slimqwen.evals.drafting import AcceptanceSettings
from slimqwen.evals.engine import EngineCheck
from slimqwen.evals.engine_process import EngineSettings
from slimqwen.evals.fidelity import Fidelity, Reference
from slimqwen.evals.fidelity_figures import FidelitySettings
from slimqwen.evals.preconditions import find_baseline
from slimqwen.evals.quality import Quality
from slimqwen.evals.runaways import ResponseLimits
from slimqwen.evals.suites.suite import AUTO, Limit, Suite
from slimqwen.progress import Progress, silent
from slimqwen.records.record import Record, ServedRecord
from slimqwen.records.reuse import changed_inputs, find_reusable
from slimqwen.records.settings import Settings, SettingsError
from slimqwen.records.split import Side, Split
from slimqwen.serving.command import ServerCommand
from slimqwen.variant import Variant

Check = Literal["fidelity", "acceptance", "quality", "engine"]
CHECKS: tuple[Check, ...] = get_args(Check)


KINDS: Mapping[Check, type[ServedRecord]] = MappingProxyType(
    {"fidelity": Fidelity, "acceptance": Acceptance, "quality": Quality, "engine": EngineCheck}
)
"""The kind of record of each check."""

_SETTINGS: Mapping[Check, type[Settings]] = MappingProxyType(
    {"fidelity": FidelitySettings, "acceptance": AcceptanceSettings, "engine": EngineSettings}
)


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
        return find_reusable(
            side,
            KINDS[check],
            self.folder / side.name,
            None if check == "engine" else self.split,
            lambda record: _has_extent(record, limit) and not self._changed_settings(record, side),
            self._inputs(check),
            self.progress,
        )

    def changed_since(self, record: Record, side: Variant) -> list[str]:
        """Names of what has changed since a check of the baseline or the variant was recorded on any machine."""
        (check,) = (name for name, kind in KINDS.items() if isinstance(record, kind))
        changed = changed_inputs(
            record.provenance,
            ServerCommand.resolve(side),
            record.deciding_flags,
            files=self._inputs(check),
            on_any_machine=True,
            progress=self.progress,
        )
        return changed + self._changed_settings(record, side, on_any_machine=True)

    def _inputs(self, check: Check) -> list[Path]:
        """Data files that a check would read now, as far as they are known before it."""
        root, name = self.variant.root, self.settings.name
        settings: Settings = self.suite if check == "quality" else _SETTINGS[check].load(name, root)
        return settings.inputs(root)

    def _changed_settings(self, record: Record, side: Variant, *, on_any_machine: bool = False) -> list[str]:
        """Names of settings, and of the baseline's state, that are other than a record of a check says."""
        if isinstance(record, Quality):
            return record.changed_settings(self.suite, may_be_old=on_any_machine)
        changed = []
        if getattr(record, "settings_name", None) != self.settings.name:
            changed.append("settings")
        if isinstance(record, Acceptance) and record.gate_depth != self.depth:
            changed.append("drafted tokens (K)")
        if isinstance(record, Fidelity | Acceptance) and not changed:
            before = record.reference
            is_known = before is not None or not on_any_machine
            if is_known and not (
                before and before.is_still(Reference.of(side, self.progress), on_any_machine=on_any_machine)
            ):
                changed.append("baseline")
        return changed

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


def _has_extent(record: Record, limit: Limit) -> bool:
    """Whether a record is of the items that are asked for; only quality takes fewer than all."""
    return not isinstance(record, Quality) or record.limit == limit
