"""The gate: is a variant as good as its baseline, and does its engine serve it correctly? Four checks, one verdict.

Fidelity detects small damage to weights, acceptance damage to the MTP head, quality worse responses, and the engine
check wrong tokens of the served flags. A check's record is reused while its inputs are unchanged;
otherwise the check is measured.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import Field, field_validator

from slimqwen import checkpoint
from slimqwen.evals import acceptance, acceptance_share, quality, quality_comparison
from slimqwen.evals.engine import EngineCheck
from slimqwen.evals.fidelity import Fidelity
from slimqwen.evals.fidelity_figures import FIGURE_NAMES
from slimqwen.evals.gate_checks import CHECKS, Check, GateChecks, GateSettings
from slimqwen.evals.quality import Quality
from slimqwen.evals.quality_comparison import TaskComparison
from slimqwen.evals.runaways import compare_responses
from slimqwen.evals.suites.suite import AUTO, Limit
from slimqwen.processes import spawner
from slimqwen.progress import Progress, silent
from slimqwen.recipe import variant_recipe
from slimqwen.records import provenance, store
from slimqwen.records.record import Estimate, Finding, RelativePath, Table, VariantName
from slimqwen.records.settings import SettingsName
from slimqwen.records.split import Side, SplitRecord
from slimqwen.serving import speed_only
from slimqwen.serving.command import ServerCommand
from slimqwen.stats import intervals
from slimqwen.stats.verdict import Verdict, overall
from slimqwen.variant import Variant

_NOTHING_DRAFTS = Finding(
    gate="acceptance",
    figure="no MTP head in variant and baseline, so nothing is drafted",
    value=0,
    limit=0,
    verdict=Verdict.PASS,
)


class Gate(SplitRecord):
    """Whether a variant is as good as its baseline: four checks and one verdict. The record's items are findings."""

    kind = "gate"
    verb = "gate"

    baseline: VariantName
    settings_name: SettingsName = Field(description="Name of the settings file in eval/gates/.")
    verdict: Verdict
    verdicts: dict[str, Verdict] = Field(
        description="Of each check.", json_schema_extra={"required": list(CHECKS)}
    )
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

    @field_validator("verdicts")
    @classmethod
    def _every_check_has_a_verdict(cls, verdicts: dict[str, Verdict]) -> dict[str, Verdict]:
        if missing := [check for check in CHECKS if check not in verdicts]:
            raise ValueError(f"no verdict of {', '.join(missing)}")
        return verdicts

    def evidence(self, experiments: Path) -> list[Path]:
        """Paths of the checks' records below `experiments`, the folder with a folder for each variant."""
        return [experiments / name for name in self.records]

    def cited(self) -> Sequence[str]:
        """Paths of the checks' records, relative to the repository."""
        return [f"experiments/{name}" for name in self.records]

    def tables(self, path: Path) -> list[Table]:
        """One row per finding; a note says how many items would decide an inconclusive one."""
        findings = _read_findings(path)
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


def _read_findings(path: Path) -> list[Finding]:
    return [Finding.model_validate(item) for item in store.read_items(path)]


@spawner.share_spawner()
def measure_gate(
    variant: Variant,
    settings_name: str,
    *,
    command: Sequence[str],
    split_side: Side | None = None,
    progress: Progress = silent,
) -> Path:
    """Run the four checks of a variant and write its gate record.

    Args:
        split_side: side of the split whose items the checks use; None for all items.

    Raises:
        ServingError: the variant's weights are random, or its acceptance length is set by a flag.
        EvalError: the variant has no baseline, or the suite's data are not fetched.
        CorpusError: a question of an own evaluation cannot be used.
    """
    speed_only.refuse_speed_only(variant, "the gate's checks")
    started = provenance.utc_now()
    checks = GateChecks.load(
        variant, settings_name, command=command, split_side=split_side, progress=progress
    )
    for side in checks.sides:
        side.require_weights()
        checkpoint.digest(side.weights, progress)  # with progress, because every check states it
    # One side of a split seldom has more items than a sample by power analysis, so all are used.
    limits: tuple[Limit, ...] = (None,) if checks.split else (None, AUTO)
    scored = {limit: [checks.find("quality", side, limit) for side in checks.sides] for limit in limits}
    for side, paths in zip(checks.sides, zip(*scored.values(), strict=True), strict=True):
        if not any(paths):
            quality.require_measurable(side, checks.suite)
    if checks.has_drafts:
        # A text too short for the prompts is found before minutes of other checks.
        acceptance.cut_class_prompts(variant, checks.settings.acceptance, checks.depth, checks.split)
    evidence: dict[Check, list[Path]] = {check: [] for check in CHECKS}
    for check, side in checks.list_measurements():
        if check != "quality":
            evidence[check].append(checks.find(check, side) or checks.measure(check, side))
        elif not evidence[check]:
            evidence[check] = _measure_quality(checks, scored)
    return _write_gate_record(checks, evidence, started)


def _measure_quality(checks: GateChecks, scored: Mapping[Limit, Sequence[Path | None]]) -> list[Path]:
    """Return quality records of baseline and variant, of a sample or of all items; reuse those that hold.

    All items are used if both have a record of all items, or if a sample of fewer leaves a task inconclusive. The
    sample and then all items are two looks, for which the verdict holds together: a variant that is worse by exactly
    the margin passes a task in at most 2.5 % of runs.

    Args:
        scored: reusable records of baseline and variant, by limit; without the key AUTO, no sample may decide.
    """

    def complete(limit: Limit) -> list[Path]:
        pairs = zip(checks.sides, scored[limit], strict=True)
        return [path or checks.measure("quality", side, limit) for side, path in pairs]

    if AUTO not in scored or all(scored[None]):
        return complete(None)
    samples = complete(AUTO)
    verdicts = [row.judgement.verdict for row in quality_comparison.compare_quality(*samples)]
    if responses := compare_responses(samples[0], samples[1], checks.settings.responses):
        verdicts += responses.verdicts
    verdict = overall(verdicts)
    if verdict != Verdict.INCONCLUSIVE:
        return samples
    left_out = any(
        score.item_count < score.available_count
        for path in samples
        for score in store.read_record(path, Quality).tasks.values()
    )
    return complete(None) if left_out else samples


def _write_gate_record(checks: GateChecks, evidence: Mapping[Check, Sequence[Path]], started: str) -> Path:
    """Write the gate record of a variant whose four checks are recorded.

    Args:
        evidence: records of each check: the variant's; for acceptance and quality the baseline's, then the variant's;
            none for acceptance if neither checkpoint has an MTP head.

    Raises:
        SlimqwenError: a record is damaged.
    """
    variant, settings = checks.variant, checks.settings
    first, second = evidence["quality"]
    comparisons = quality_comparison.compare_quality(first, second)
    responses = compare_responses(first, second, settings.responses)
    findings = [
        *_fidelity_findings(store.read_record(evidence["fidelity"][0], Fidelity)),
        *_recipe_findings(variant),
        _acceptance_finding(*evidence["acceptance"]) if evidence["acceptance"] else _NOTHING_DRAFTS,
        *_quality_findings(comparisons),
        *(responses.findings() if responses else ()),
        _engine_finding(store.read_record(evidence["engine"][0], EngineCheck)),
    ]
    verdicts = {
        str(check): overall([finding.verdict for finding in findings if finding.gate == check])
        for check in CHECKS
    }
    record = Gate(
        variant=variant.name,
        baseline=checks.baseline.name,
        settings_name=settings.name,
        split=checks.split,
        verdict=overall(list(verdicts.values())),
        verdicts=verdicts,
        records=tuple(f"{path.parent.name}/{path.name}" for check in CHECKS for path in evidence[check]),
        changed_limits=tuple(_changed_limits(variant, settings, findings)),
        looks=tuple(f"{row.task}: {row.looks}" for row in comparisons if row.looks.is_worth_a_line),
        provenance=provenance.describe(
            ServerCommand.resolve(variant), checks.command, started, datasets=settings.files(variant.root)
        ),
    )
    return store.write_record(variant.folder, record, (finding.as_json() for finding in findings))


def _changed_limits(variant: Variant, settings: GateSettings, findings: Sequence[Finding]) -> Iterator[str]:
    """A line with old and new value for each limit that changed since these settings first judged the variant."""
    first: dict[str, float] = {}
    # Newest first, so that the oldest record overrides: its limit was fixed before any result.
    for path in store.records(variant.folder, Quality):
        record = store.read_record(path, Quality)
        if record.suite == settings.quality:
            first |= {
                _quality_figure(task, score.measure): -score.non_inferiority_margin
                for task, score in record.tasks.items()
            }
    for path in store.records(variant.folder, Gate):
        if store.read_record(path, Gate).settings_name == settings.name:
            first |= {finding.figure: finding.limit for finding in _read_findings(path)}
    for finding in findings:
        limit = first.get(finding.figure, finding.limit)
        if limit != finding.limit:
            yield f"{finding.figure}: {abs(limit):g} at first, {abs(finding.limit):g} now"


def _quality_figure(task: str, measure: str) -> str:
    return f"{task}: gain of {measure}"


def gate_p_value(path: Path) -> float:
    """One-sided p-value of the hypothesis that a gated variant is worse than one of its limits.

    It is the largest p-value of all figures: rejecting "at least one is true" means rejecting each at the full level
    (intersection-union test; Berger, Technometrics 24 (1982), 295-300). A figure without an interval is not an
    estimate: its p-value is 0 where it passes, else 1.
    """
    return max(
        finding.p_value
        if finding.p_value is not None
        else float(finding.low is not None or finding.verdict != Verdict.PASS)
        for finding in _read_findings(path)
    )


def _fidelity_p_value(estimate: Estimate, limit: float) -> float:
    return intervals.p_value(
        estimate.value, estimate.standard_error, estimate.count, limit, higher_is_better=False
    )


def _fidelity_findings(record: Fidelity) -> Iterator[Finding]:
    """One finding for each figure: its largest value over the modes that were compared."""
    for figure in FIGURE_NAMES:
        estimates = [getattr(figures, figure) for figures in record.modes.values()]
        worst: Estimate | None = max(estimates, key=lambda each: each.value if each else 0.0)
        low, high = worst.interval if worst else (None, None)
        limit = getattr(record.limits, figure)
        yield Finding(
            gate="fidelity",
            figure=figure,
            value=worst.value if worst else None,
            low=low,
            high=high,
            limit=limit,
            verdict=overall([verdicts[figure] for verdicts in record.verdicts.values()]),
            p_value=max(_fidelity_p_value(each, limit) if each else 1.0 for each in estimates),
        )
    if unchanged := record.unchanged:
        for row in unchanged.ratios:
            yield Finding(
                gate="fidelity",
                figure=f"{row.figure} of the mode {row.mode}, over the noise of this machine",
                limit=unchanged.limit,
                **row.model_dump(include={"value", "low", "high", "verdict", "p_value"}),
            )
    joined = [each.joined_kl_nats for each in record.modes.values() if each.joined_kl_nats is not None]
    if joined:
        verdict = overall([verdicts["joined_kl_nats"] for verdicts in record.verdicts.values()])
        limit = record.limits.kl_nats
        yield Finding(
            gate="fidelity", figure="joined_kl_nats", value=max(joined), limit=limit, verdict=verdict
        )


def _recipe_findings(variant: Variant) -> Iterator[Finding]:
    """Tensors and settings changed by no stage of the recipe: other limits would miss damage to one norm or decay."""
    if variant.recipe is None:
        return
    for what, changes in (
        ("tensors", variant_recipe.unexplained_changes(variant)),
        ("settings of config.json", variant_recipe.unexplained_settings(variant)),
        ("files of tokenizer and chat template", variant_recipe.unexplained_files(variant)),
    ):
        figure = f"{what} changed by no stage of the recipe"
        verdict = Verdict.FAIL if changes else Verdict.PASS
        yield Finding(gate="fidelity", figure=figure, value=len(changes), limit=0, verdict=verdict)


def _acceptance_finding(first: Path, second: Path) -> Finding:
    share = acceptance_share.compare_acceptance(first, second)
    return Finding(
        gate="acceptance",
        figure=f"acceptance length at K = {share.depth}, share of the baseline's",
        value=share.ratio.value,
        low=share.ratio.low,
        high=share.ratio.high,
        limit=share.least_share,
        verdict=share.verdict,
        p_value=share.p_value,
    )


def _quality_findings(rows: Iterable[TaskComparison]) -> Iterator[Finding]:
    for row in rows:
        yield Finding(
            gate="quality",
            figure=_quality_figure(row.task, row.measure),
            value=row.gain,
            low=row.judgement.low,
            high=row.judgement.high,
            limit=-row.judgement.margin,
            verdict=row.judgement.verdict,
            p_value=row.judgement.p_value,
            items_needed=row.items_planned,
        )


def _engine_finding(record: EngineCheck) -> Finding:
    """Finding of the served engine alone, because no server of the variant runs with the flags of its neighbours."""
    served = record.served
    figure = (
        "breakdown of the served engine"
        if served.failure
        else f"wrong responses of the served engine, of {served.responses}"
    )
    value = 1 if served.failure else served.wrong_responses
    return Finding(gate="engine", figure=figure, value=value, limit=0, verdict=record.verdict)
