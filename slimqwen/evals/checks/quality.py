"""The check quality: scores on the tasks of a suite, and responses that run away, paired by item."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict, Field

from slimqwen.evals import quality, quality_comparison
from slimqwen.evals.checks.check import Check
from slimqwen.evals.looks import read_looks
from slimqwen.evals.quality import Quality
from slimqwen.evals.runaways import ResponseLimits, compare_responses
from slimqwen.evals.suites.suite import AUTO, Limit, Suite
from slimqwen.records import store
from slimqwen.records.record import Finding
from slimqwen.records.settings import Settings, SettingsError
from slimqwen.stats.verdict import Verdict
from slimqwen.variant import Variant
from slimqwen.yaml_file import YamlPart


class QualitySettings(Settings):
    """The keys quality and responses of eval/gates/<name>.yaml.

    Attributes:
        suite: name of a suite of eval/suites/, or of an own evaluation.
        responses: limits of responses that run away.
    """

    model_config = ConfigDict(extra="ignore")  # the file's other keys are other checks' sections

    folder: ClassVar[str] = "gates"
    own_file: ClassVar[str] = "gate"

    suite: str = Field(alias="quality")
    responses: ResponseLimits


def find_response_limits(suite: str, root: Path) -> ResponseLimits | None:
    """Limits of responses that run away, from the gate's settings of the suite's name; None without a readable file."""
    try:
        return QualitySettings.load(suite, root).responses
    except SettingsError:
        return None


@dataclass(frozen=True)
class QualityCheck(Check[QualitySettings]):
    """The check that detects worse responses.

    First a sample of the items is scored; if it does not decide, all are. The verdict holds for both looks together: a
    variant that is worse by exactly the margin passes a task in at most 2.5 % of runs.

    Attributes:
        all_items: whether to score all items at once, without a sample first.
    """

    name = "quality"
    kind = Quality
    settings_type = QualitySettings

    all_items: bool = False

    @cached_property
    def suite(self) -> Suite:
        """The suite that both sides are scored on."""
        return Suite.load(self.settings.suite, self.pair.variant.root)

    @property
    def limit(self) -> Limit:
        """Number of items to score of each task: AUTO, the sample size by power analysis, or None for all.

        The items on one side of a split are few, so all of them are scored.
        """
        return None if self.all_items or self.pair.invocation.split else AUTO

    @staticmethod
    def input_readers(settings: QualitySettings, variant: Variant) -> Sequence[Callable[[], object]]:
        """A function that reads the questions of an own evaluation."""
        return [lambda: Suite.load(settings.suite, variant.root).require_questions(variant.root)]

    def require_measurable(self) -> None:
        """Check that the suite can be run on the sides that have to be scored.

        Raises:
            ServingError: a side's weights are random, or a flag sets its acceptance length.
            EvalError: the suite's data are not fetched.
            CorpusError: a question of an own evaluation cannot be used.
        """
        complete = replace(self, all_items=True)
        for side in self.sides:
            if not (complete.find(side) or self.find(side)):
                quality.require_measurable(side, self.suite)

    def inputs(self) -> Sequence[Path | YamlPart]:
        """The files of the suite."""
        return self.suite.inputs(self.pair.variant.root)

    def measure(self, side: Variant) -> Path:
        """Score a side on the suite, and write the record."""
        return quality.measure_quality(side, self.suite, self.limit, self.pair.invocation)

    def collect(self) -> Sequence[Path]:
        """Get both sides' records of a sample, or of all items if these exist or the sample leaves a task undecided."""
        complete = replace(self, all_items=True)
        if self.limit is None or all(complete.find(side) for side in self.sides):
            return Check.collect(complete)
        samples = super().collect()
        if self.judge(samples) != Verdict.INCONCLUSIVE:
            return samples
        return complete.collect() if self._has_more(samples) else samples

    def _has_more(self, samples: Sequence[Path]) -> bool:
        """Whether an undecided task, or one with responses if those are undecided, has items beyond the sample."""
        first, second = samples
        rows = quality_comparison.compare_quality(first, second)
        undecided = {row.task for row in rows if row.judgement.verdict == Verdict.INCONCLUSIVE}
        responses = compare_responses(first, second, self.settings.responses)
        findings = responses.findings() if responses else ()
        are_undecided = any(finding.verdict == Verdict.INCONCLUSIVE for finding in findings)
        return any(
            score.item_count < score.available_count
            for path in samples
            for task, score in store.read_record(path, Quality).tasks.items()
            if task in undecided or (are_undecided and score.output_count is not None)
        )

    def changed_settings(self, record: Any, side: Variant, *, on_any_machine: bool = False) -> list[str]:
        """Names of the suite's settings that differ from a record's; unless `on_any_machine`, number of items too."""
        changed: list[str] = record.changed_settings(self.suite, may_be_old=on_any_machine)
        if not on_any_machine and record.limit != self.limit:
            changed.append("number of items")
        return changed

    def findings(self, paths: Sequence[Path]) -> Iterator[Finding]:
        """Yield a figure with its verdict for each task, then those on responses that run away."""
        first, second = paths
        for row in quality_comparison.compare_quality(first, second):
            yield Finding(
                gate=self.name,
                figure=_figure(row.task, row.measure),
                value=row.gain,
                low=row.judgement.low,
                high=row.judgement.high,
                limit=-row.judgement.margin,
                verdict=row.judgement.verdict,
                p_value=row.judgement.p_value,
                items_needed=row.items_planned,
            )
        if responses := compare_responses(first, second, self.settings.responses):
            yield from responses.findings()

    def looks(self, paths: Sequence[Path]) -> Iterator[str]:
        """Yield a line for each task whose items were scored before (a later look)."""
        for task, looks in read_looks(paths[1]).items():
            if looks.is_worth_a_line:
                yield f"{task}: {looks}"

    def first_limits(self) -> Mapping[str, float]:
        """Name of a task's figure -> its margin in the variant's oldest record of the suite."""
        limits: dict[str, float] = {}
        for path in store.records(self.pair.variant.folder, Quality):  # newest first: the oldest overrides
            record = store.read_record(path, Quality)
            if record.suite == self.settings.suite:
                limits |= {
                    _figure(task, score.measure): -score.non_inferiority_margin
                    for task, score in record.tasks.items()
                }
        return limits


def _figure(task: str, measure: str) -> str:
    return f"{task}: gain of {measure}"
