"""The base class of a check of the gate: what it measures on variant and baseline, and how it judges the records."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from slimqwen.evals.invocation import Invocation
from slimqwen.records.record import Finding, Record, ServedRecord
from slimqwen.records.reuse import changed_inputs, find_reusable
from slimqwen.records.settings import Settings
from slimqwen.records.split import SplitRecord
from slimqwen.serving.command import ServerCommand
from slimqwen.stats.verdict import Verdict, overall
from slimqwen.variant import Variant
from slimqwen.yaml_file import YamlPart

Section = TypeVar("Section", bound=Settings)


@dataclass(frozen=True)
class Pair:
    """A variant and its baseline, with the settings that all their checks share.

    Attributes:
        variant: the variant that is judged.
        baseline: the variant that it is compared with.
        invocation: command, folder of the records, side of the split, and progress.
    """

    variant: Variant
    baseline: Variant
    invocation: Invocation

    @property
    def sides(self) -> tuple[Variant, Variant]:
        """The baseline and the variant."""
        return self.baseline, self.variant


@dataclass(frozen=True)
class Check(ABC, Generic[Section]):
    """One check of a variant against its baseline; base class of the gate's checks (`slimqwen.evals.checks.CHECKS`).

    A side is the baseline or the variant. A subclass measures a side and writes a record of it (`measure`), and judges
    the records of all sides together (`findings`). The gate calls `require_measurable`, then `collect`, then
    `findings`.

    Attributes:
        name: name in commands, records and verdicts.
        kind: the records of the check.
        settings_type: what the check reads of a gate's settings file.
        measures_baseline: whether the baseline has a record of its own.
        takes_minutes: whether its measurement takes minutes on the embedded model, so that the demo leaves it out.
        loads_baseline: whether measuring a side also loads the baseline in float32, which needs memory.
        pair: the variant and its baseline.
        settings: what the check measures, and its limits.
    """

    name: ClassVar[str]
    kind: ClassVar[type[ServedRecord]]
    settings_type: ClassVar[type[Settings]]
    measures_baseline: ClassVar[bool] = True
    takes_minutes: ClassVar[bool] = False
    loads_baseline: ClassVar[bool] = False

    pair: Pair
    settings: Section

    @property
    def sides(self) -> Sequence[Variant]:
        """The sides that are measured, the baseline first; none if the check does not apply to the pair."""
        return self.pair.sides if self.measures_baseline else (self.pair.variant,)

    @property
    def setup(self) -> str:
        """Setting of the variant with which the baseline is measured, such as "K = 4" (drafts); empty for none."""
        return ""

    @staticmethod
    @abstractmethod
    def input_readers(settings: Any, variant: Variant) -> Sequence[Callable[[], object]]:
        """Functions that read all input texts of a check, such as its questions, to find faults without an engine.

        Each raises a SlimqwenError that names the faults. The variant's own checkpoint need not exist.

        Args:
            settings: the check's settings, of its class `settings_type`.
            variant: variant that the check will judge.
        """

    def require_measurable(self) -> None:
        """Check within seconds that the measurement can be made, so that the gate does not fail after minutes.

        Raises:
            SlimqwenError: an input of the measurement cannot be used.
        """

    def inputs(self) -> Sequence[Path | YamlPart]:
        """Data files that a measurement would read; a record is reused only if they are unchanged."""
        return self.settings.inputs(self.pair.variant.root)

    def find(self, side: Variant) -> Path | None:
        """Find the newest record of a side whose inputs are unchanged, so that it can be reused; None without one."""
        return find_reusable(
            side,
            self.kind,
            self.pair.invocation.records_of(side),
            self.pair.invocation.split if issubclass(self.kind, SplitRecord) else None,
            lambda record: not self.changed_settings(record, side),
            self.inputs(),
            self.pair.invocation.progress,
        )

    @abstractmethod
    def measure(self, side: Variant) -> Path:
        """Measure a side and write its record.

        Args:
            side: the variant or the baseline.

        Returns:
            Path of the record.
        """

    def collect(self) -> Sequence[Path]:
        """Get the records of all sides, the baseline's first; a side without a record that still holds is measured."""
        return [self.find(side) or self.measure(side) for side in self.sides]

    @abstractmethod
    def findings(self, paths: Sequence[Path]) -> Iterator[Finding]:
        """Yield the figures of the check, each with its limit and verdict.

        Args:
            paths: records of all sides, as `collect` returns them.

        Raises:
            SlimqwenError: a record is damaged, or the records cannot be compared.
        """

    def judge(self, paths: Sequence[Path]) -> Verdict:
        """One verdict for the check: fail if a figure fails; else inconclusive if one is, or there is none; else pass.

        Args:
            paths: records of all sides, as `collect` returns them.
        """
        return overall([finding.verdict for finding in self.findings(paths)])

    def looks(self, paths: Sequence[Path]) -> Iterator[str]:
        """Yield a line for each task whose items were scored before, so that this is a later look; by default none.

        Args:
            paths: records of all sides, as `collect` returns them.
        """
        yield from ()

    def first_limits(self) -> Mapping[str, float]:
        """Name of a figure -> its limit in the variant's oldest record, to show limits that were changed later.

        Empty, by default, for a check whose records state no limits.
        """
        return {}

    def changed_since(self, record: Record, side: Variant) -> list[str]:
        """Names of the inputs and settings that changed since a record was made; its machine may be another one.

        Args:
            record: record of the class `kind`.
            side: the variant or baseline of which it is a record.

        Returns:
            The names; an empty list if the record still holds.
        """
        changed = changed_inputs(
            record.provenance,
            ServerCommand.resolve(side),
            record.deciding_flags,
            files=self.inputs(),
            on_any_machine=True,
            progress=self.pair.invocation.progress,
        )
        return changed + self.changed_settings(record, side, on_any_machine=True)

    def changed_settings(self, record: Any, side: Variant, *, on_any_machine: bool = False) -> list[str]:
        """Names of the settings, and of the baseline's properties, that differ from those in a record.

        Args:
            record: record of the class `kind`.
            side: the variant or baseline of which it is a record.
            on_any_machine: whether another build of the baseline's checkpoint, or an old record that does not name it,
                counts as unchanged.

        Returns:
            The names; an empty list if nothing differs.
        """
        return [] if record.settings_name == self.settings.name else ["settings"]
