"""The gate: is a variant as good as its baseline, and does its engine serve it correctly? Some checks, one verdict.

`slimqwen.evals.checks` has the checks. A check's record is reused while its inputs are unchanged; otherwise the check
is measured.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pydantic import Field

from slimqwen import checkpoint
from slimqwen.evals.checks import GateSettings, Pair
from slimqwen.evals.invocation import Invocation
from slimqwen.evals.preconditions import find_baseline
from slimqwen.processes import spawner
from slimqwen.progress import Progress, silent
from slimqwen.records import provenance, store
from slimqwen.records.record import Finding, RelativePath, Table, VariantName
from slimqwen.records.settings import SettingsName
from slimqwen.records.split import Side, SplitRecord
from slimqwen.serving import speed_only
from slimqwen.serving.command import ServerCommand
from slimqwen.stats.verdict import Verdict, overall
from slimqwen.variant import Variant


class Gate(SplitRecord):
    """One verdict of all checks: is a variant as good as its baseline, and does its engine serve it correctly?

    The record's items are the findings of the checks, one for each figure.
    """

    kind = "gate"
    verb = "gate"
    needs_baseline = True

    baseline: VariantName
    settings_name: SettingsName = Field(description="Name of the settings file in eval/gates/.")
    verdict: Verdict
    verdicts: dict[str, Verdict] = Field(min_length=1, description="Of each check.")
    records: tuple[RelativePath, ...] = Field(
        min_length=1, description="The checks' records, <variant>/<file>."
    )
    changed_limits: tuple[str, ...] = Field(
        default=(), description="Limits that had another value when these settings first judged the variant."
    )
    looks: tuple[str, ...] = Field(
        default=(),
        description="Tasks of which this is not the first look at items that grew, or whose count began anew; the "
        "intervals hold for all counted looks together.",
    )

    @property
    def caution(self) -> str:
        """A warning about limits that were changed after the variant had been judged; empty if there are none."""
        changes = "; ".join(self.changed_limits)
        return changes and f"limits changed after the variant had been judged: {changes}"

    def evidence(self, experiments: Path) -> list[Path]:
        """Paths of the checks' records in `experiments`, the folder with a folder for each variant."""
        return [experiments / name for name in self.records]

    def cited(self) -> Sequence[str]:
        """Paths of the checks' records, relative to the repository."""
        return [f"experiments/{name}" for name in self.records]

    def tables(self, path: Path) -> list[Table]:
        """One row per finding; a note says how many items would decide an inconclusive one."""
        findings = read_findings(path)
        columns: dict[str, Callable[[Finding], object]] = {
            "check": lambda row: row.gate,
            "figure": lambda row: row.figure,
            "value": lambda row: None if row.value is None else f"{row.value:.5g}",
            "95 % interval": lambda row: None if row.low is None else f"{row.low:+.4f} to {row.high:+.4f}",
            "limit": lambda row: f"{row.limit:g}",
            "verdict": lambda row: row.verdict,
        }
        title = f"Gate of {self.variant} against {self.baseline}: {self.verdict}"
        notes = (
            f"{', '.join(f'{check}: {verdict}' for check, verdict in self.verdicts.items())}.",
            f"Records: {', '.join(self.records)}.",
            *(
                f"{row.figure}: {row.items_needed:,} items were planned to decide."
                for row in findings
                if row.items_needed and row.verdict == Verdict.INCONCLUSIVE
            ),
            *(f"{look}." for look in self.looks),
            *([f"{self.caution.capitalize()}."] if self.caution else []),
            provenance.source_note(self, path),
        )
        return [Table.from_rows(title, findings, columns, *notes, text_columns=2)]


def read_findings(path: Path) -> list[Finding]:
    """Read the figures of a gate record, each with its check, limit and verdict."""
    return [Finding.model_validate(item) for item in store.read_items(path)]


@spawner.share_spawner()
def measure_gate(
    variant: Variant,
    settings: GateSettings,
    *,
    command: Sequence[str],
    split_side: Side | None = None,
    progress: Progress = silent,
) -> Path:
    """Run the checks of a variant and write its gate record.

    A check's record of unchanged inputs is reused, so a second call measures only what is missing.

    Args:
        variant: the variant, which must have a baseline.
        settings: what each check measures and allows.
        command: command line that the records state as their origin.
        split_side: side of the split whose items the checks use; None for all items.
        progress: receives (activity, done, total).

    Returns:
        Path of the record. A failed or inconclusive check is a verdict in it, not an error.

    Raises:
        ServingError: the variant's weights are random, or a flag sets its acceptance length.
        EvalError: the variant has no baseline, or the suite's data are not fetched.
        CorpusError: a question of an own evaluation cannot be used, or a text is too short for the prompts.
        MissingCheckpointError, CorruptCheckpointError: a checkpoint of variant or baseline is missing or damaged.
    """
    speed_only.refuse_speed_only(variant, "the gate's checks")
    started = provenance.utc_now()
    split = settings.split(split_side, variant.root)
    pair = Pair(variant, find_baseline(variant), Invocation(command, split=split, progress=progress))
    checks = settings.checks(pair)
    for side in pair.sides:
        side.require_weights()
        checkpoint.digest(side.weights, progress)  # with progress, because every check states it
    for check in checks.values():
        check.require_measurable()
    evidence = {name: check.collect() for name, check in checks.items()}
    findings = {name: list(check.findings(evidence[name])) for name, check in checks.items()}
    verdicts = {name: overall([finding.verdict for finding in found]) for name, found in findings.items()}
    first_limits = {
        figure: limit for each in checks.values() for figure, limit in each.first_limits().items()
    }
    all_findings = [finding for found in findings.values() for finding in found]
    record = Gate(
        variant=variant.name,
        baseline=pair.baseline.name,
        settings_name=settings.name,
        split=split,
        verdict=overall(list(verdicts.values())),
        verdicts=verdicts,
        records=tuple(f"{path.parent.name}/{path.name}" for paths in evidence.values() for path in paths),
        changed_limits=tuple(_changed_limits(variant, settings.name, first_limits, all_findings)),
        looks=tuple(line for name, check in checks.items() for line in check.looks(evidence[name])),
        provenance=provenance.describe(
            ServerCommand.resolve(variant), command, started, datasets=settings.files(variant.root)
        ),
    )
    return store.write_record(variant.folder, record, (finding.as_json() for finding in all_findings))


def _changed_limits(
    variant: Variant, settings_name: str, first: dict[str, float], findings: Sequence[Finding]
) -> Iterator[str]:
    """A line with old and new value for each limit that changed since these settings first judged the variant.

    Args:
        first: limits, by figure, with which the checks' own records were written.
    """
    # Newest first, so that the oldest record overrides: its limit was fixed before any result.
    for path in store.records(variant.folder, Gate):
        if store.read_record(path, Gate).settings_name == settings_name:
            first |= {finding.figure: finding.limit for finding in read_findings(path)}
    for finding in findings:
        limit = first.get(finding.figure, finding.limit)
        if limit != finding.limit:
            yield f"{finding.figure}: {abs(limit):g} at first, {abs(finding.limit):g} now"


def gate_p_value(path: Path) -> float:
    """One-sided p-value of the hypothesis that a gated variant is worse than one of its limits.

    It is the largest p-value of all figures: rejecting "at least one is true" means rejecting each at the full level
    (intersection-union test; Berger, Technometrics 24 (1982), 295-300). A figure without an interval is not an
    estimate: its p-value is 0 where it passes, else 1.

    Args:
        path: file of the gate record.
    """
    return max(
        finding.p_value
        if finding.p_value is not None
        else float(finding.low is not None or finding.verdict != Verdict.PASS)
        for finding in read_findings(path)
    )
