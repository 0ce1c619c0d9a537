"""The leaderboard: one row per variant and hardware, from records alone.

A cell shows a figure of one record, or a comparison of two paired records; nothing is averaged here. Every record kind
appears without an edit here: its verdict in the column evidence, its `leaderboard_columns` as columns.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from slimqwen.bench.latency import Latency
from slimqwen.bench.latency.speedups import ALL_CLASSES, Speedup, compare_latency, count_tries
from slimqwen.evals import quality_comparison
from slimqwen.evals.gate import Gate
from slimqwen.evals.quality import Quality, TaskScore
from slimqwen.evals.quality_comparison import TaskComparison
from slimqwen.records import provenance, registry, store
from slimqwen.records.collection import Collection, Problem, StoredRecord
from slimqwen.records.record import Figure, MeasuredCheckpoint, Record, ServedRecord
from slimqwen.records.table import Table
from slimqwen.report import builds
from slimqwen.report.quality_pairs import DAMAGED as DAMAGED
from slimqwen.report.quality_pairs import find_pairs, judge_responses
from slimqwen.stats import verdict

_NEEDED = (Quality.kind, Latency.kind, Gate.kind)
"""Record kinds without which no variant is chosen; a gate record implies its checks. Baselines need no gate."""


@dataclass(frozen=True)
class Margins:
    """Change of a task's score in units of its non-inferiority margin, with its 95 % interval; a loss is negative."""

    task: str
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Score:
    """Score of one task, and its change relative to the baseline.

    Attributes:
        task: name of the task without the suite's name before it.
        row: score of the variant.
        change: change relative to the baseline on the same items; None if the records cannot be paired.
    """

    suite: str
    task: str
    row: TaskScore
    change: TaskComparison | None = None

    @property
    def gain(self) -> Margins | None:
        """The change in units of the task's margin (of the measure, if the margin is 0); None if it is not paired."""
        if self.change is None:
            return None
        judgement = self.change.judgement
        unit = judgement.margin or 1.0
        return Margins(self.task, self.change.gain / unit, judgement.low / unit, judgement.high / unit)


@dataclass(frozen=True)
class Evidence:
    """The newest record of a kind.

    Attributes:
        verdict: pass, fail, inconclusive; "measured" for a kind without verdict, "missing" without a record.
        is_stale: whether it measured a checkpoint of another recipe than the newest quality record did.
        caution: a warning that the record adds to its verdict; empty for none.
    """

    kind: str
    verdict: str
    is_stale: bool = False
    caution: str = ""


@dataclass(frozen=True)
class Timing:
    """A latency record of a variant, and the comparison with its baseline.

    Attributes:
        comparison: paired ratios of the two latency records; empty if they were not timed in turns.
        as_scored: whether it timed the checkpoint of the newest quality record, or another build of that.
        tries: how many times the same pair was timed with the same settings up to this record, at least 1.
    """

    latency: StoredRecord[Latency]
    comparison: tuple[Speedup, ...] = ()
    as_scored: bool = True
    tries: int = 1

    @cached_property
    def speed(self) -> Speedup | None:
        """Speed-up over all requests; None if requests overlapped or the variants were not timed in turns."""
        rows = (row for row in self.comparison if row.prompt_class == ALL_CLASSES and row.speedup)
        return next(rows, None)

    @property
    def is_faster(self) -> bool:
        """Whether the whole interval of the speed-up is above 1."""
        return self.speed is not None and self.speed.interval is not None and self.speed.interval[0] > 1


@dataclass(frozen=True)
class Row:
    """One variant on one hardware.

    Attributes:
        hypothesis: hypothesis in measurements.json; empty if that cannot be read.
        baseline: name of the baseline; None for a baseline.
        status: planned, measured, promoted or rejected; "unreadable" if measurements.json cannot be read.
        verdict: verdict in measurements.json; None without one.
        hardware: hardware of the latency record, else of the quality record; empty without a record.
        timed: latency on this hardware; None if there is none.
        figures: figure and its record for each heading of the kinds' leaderboard columns.
        size_bytes: size of the checkpoint that was measured last; None without a measurement.
        evidence: the newest record of each kind in experiments/.
        other_builds: phrases that name the record kinds that measured another build of the checkpoint than this
            machine has; if it has none, another build than quality scored.
        is_remade: whether this machine's checkpoint is of another recipe than the one that quality scored.
    """

    variant: str
    hypothesis: str
    baseline: str | None
    status: str
    verdict: str | None
    hardware: str
    on_cpu: bool
    scores: Mapping[tuple[str, str], Score]
    timed: Timing | None
    figures: Mapping[str, tuple[Figure, StoredRecord[Record]]]
    size_bytes: int | None
    evidence: tuple[Evidence, ...]
    other_builds: tuple[str, ...] = ()
    is_remade: bool = False

    @property
    def group(self) -> tuple[str, str]:
        """Baseline and hardware; only rows of the same group are compared."""
        return self.baseline or self.variant, self.hardware

    @property
    def is_measured(self) -> bool:
        """Whether there is evidence: a record in experiments/."""
        return any(evidence.verdict != "missing" for evidence in self.evidence)

    @property
    def standing(self) -> str:
        """What the table shows as the variant's state: promoted or rejected, else the verdict, else the status."""
        return self.status if self.status in ("promoted", "rejected") else self.verdict or self.status

    @cached_property
    def worst(self) -> Margins | None:
        """The task whose interval has the lowest lower end, in margins; None if no task is paired."""
        gains = [score.gain for score in self.scores.values() if score.gain]
        return min(gains, key=lambda gain: gain.low, default=None)

    @property
    def passed_quality(self) -> bool:
        """Whether every paired task of the newest checkpoint passes."""
        return any((evidence.kind, evidence.verdict) == (Quality.kind, "pass") for evidence in self.evidence)

    @property
    def doubts(self) -> list[str]:
        """Reasons from the newest records that contradict or weaken the claimed verdict."""
        current = [evidence for evidence in self.evidence if not evidence.is_stale]
        doubts = [
            f"its newest {evidence.kind.replace('_', ' ')} record fails"
            for evidence in current
            if evidence.verdict == "fail"
        ]
        if self.verdict == "pass":
            doubts += [
                f"its newest {evidence.kind.replace('_', ' ')} record is inconclusive"
                for evidence in current
                if evidence.verdict == "inconclusive"
            ]
        if self.timed and not self.timed.as_scored:
            doubts.append("latency and quality are of different checkpoints")
        if self.is_remade:
            doubts.append("its checkpoint was made by another recipe since")
        return doubts

    @property
    def missing(self) -> list[str]:
        """Record kinds that are needed to choose a variant, but are missing or measured an earlier checkpoint."""
        needed = _NEEDED if self.baseline else _NEEDED[:2]
        return [
            evidence.kind
            for evidence in self.evidence
            if evidence.kind in needed and (evidence.verdict == "missing" or evidence.is_stale)
        ]


_Problems = dict[str, str]
"""Problems with items that cannot be used, by location."""


def rows_of(collection: Collection, variant: str) -> tuple[list[Row], list[Problem]]:
    """Make the rows of one variant: one per hardware with latency records; without such records, one row.

    Returns:
        The rows, and a problem for each record whose items cannot be used.
    """
    problems: _Problems = {}
    claims = collection.measurements.get(variant)
    baseline = claims.baseline if claims else None
    records = sorted(
        (entry for entry in collection.records if entry.variant == variant),
        key=lambda entry: entry.ended,
        reverse=True,
    )
    scored = next(iter(collection.select(Quality, variant)), None)
    scored_checkpoint = scored.record.provenance.checkpoint if scored else None
    present = builds.find_made_checkpoint(collection.root, variant) or scored_checkpoint
    scores = _scores(collection, variant, baseline, problems)
    changes = [score.change.judgement.verdict for score in scores.values() if score.change]
    changes += judge_responses(collection.root, find_pairs(collection, variant, baseline)) if changes else []
    paired_verdicts = {Quality.kind: str(verdict.overall(changes))} if changes else {}
    latencies = collection.select(Latency, variant)
    machines = list(dict.fromkeys(map(hardware, latencies)))
    machines = machines or [hardware(entry) for entry in (scored, *records) if entry][:1] or [""]
    sizes = [each.size_bytes for entry in records if (each := entry.record.provenance.checkpoint)]
    rows = []
    for machine in machines:
        timed = [each for each in latencies if hardware(each) == machine]
        rows.append(
            Row(
                variant=variant,
                hypothesis=claims.hypothesis if claims else "",
                baseline=baseline,
                status=claims.status if claims else "unreadable",
                verdict=claims.verdict if claims else None,
                hardware=machine,
                on_cpu=any(
                    hardware(entry) == machine and not entry.record.provenance.hardware.gpus
                    for entry in records
                ),
                scores=scores,
                timed=_timing(collection, timed, baseline, scored_checkpoint, problems),
                figures=_figures(collection, variant, machine),
                size_bytes=next(filter(None, sizes), None),
                evidence=tuple(_evidence(collection, variant, baseline, scored_checkpoint, paired_verdicts)),
                other_builds=tuple(builds.describe_builds(variant, [*timed, *records], present)),
                is_remade=builds.relate(scored_checkpoint, present) == "another recipe",
            )
        )
    return rows, [Problem(location, reason) for location, reason in problems.items()]


def hardware(entry: StoredRecord[Record]) -> str:
    """Readable name of the hardware that a record was measured on."""
    return provenance.hardware_name(entry.record.provenance.hardware)


def _has_items(entry: StoredRecord[Record], problems: _Problems) -> bool:
    """Whether a record has usable items; damaged items are added to `problems`."""
    try:
        return bool(_items(entry.path))
    except DAMAGED as error:
        problems[entry.location] = f"its items cannot be used: {error}"
        return False


@cache
def _items(path: Path) -> tuple[Mapping[str, Any], ...]:
    return tuple(store.read_items(path))


def _figures(
    collection: Collection, variant: str, machine: str
) -> dict[str, tuple[Figure, StoredRecord[Record]]]:
    """Figures of the kinds' leaderboard columns, each from the newest record on this hardware, else on any."""
    figures = {}
    for kind in registry.kinds().values():
        if kind.leaderboard_columns and (records := collection.select(kind, variant)):
            entry = min(records, key=lambda entry: hardware(entry) != machine)
            values = entry.record.figures()
            for name, heading in kind.leaderboard_columns.items():
                if name in values:
                    figures[heading] = values[name], entry
    return figures


def _evidence(
    collection: Collection,
    variant: str,
    baseline: str | None,
    scored: MeasuredCheckpoint | None,
    paired_verdicts: Mapping[str, str],
) -> Iterable[Evidence]:
    """The newest record of each kind; `paired_verdicts`, by kind, replace the verdict of the record itself."""
    for kind, model in registry.kinds().items():
        if not issubclass(model, ServedRecord) or (model.needs_baseline and not baseline):
            continue
        entry = next(iter(collection.select(model, variant)), None)
        if entry is None:
            yield Evidence(kind, "missing")
            continue
        outcome = paired_verdicts.get(kind) or entry.record.outcome or "measured"
        yield Evidence(kind, outcome, not builds.fits(entry, scored), entry.record.caution)


def _scores(
    collection: Collection, variant: str, baseline: str | None, problems: _Problems
) -> dict[tuple[str, str], Score]:
    """Scores by suite and task, from the pair that `quality_comparison.best_pair` chooses, else the largest record."""
    variant_records = quality_comparison.of_newest_checkpoint(collection.select(Quality, variant))
    pairs = find_pairs(collection, variant, baseline)
    scores: dict[tuple[str, str], Score] = {}
    for suite in sorted({entry.record.suite for entry in variant_records}):
        suite_records = [entry for entry in variant_records if entry.record.suite == suite]
        pair = pairs.get(suite)
        changes = _changes(*pair, problems) if pair else {}
        shown = pair[1] if pair else quality_comparison.largest_record(suite_records)
        for task, row in shown.record.tasks.items() if shown else ():
            name = task.removeprefix(f"{suite}_")
            scores[suite, name] = Score(suite, name, row, changes.get(task))
    return scores


def _changes(
    first: StoredRecord[Quality], second: StoredRecord[Quality], problems: _Problems
) -> dict[str, TaskComparison]:
    """Paired changes by task, second minus first; empty if items are damaged, which is added to `problems`."""
    if not (_has_items(first, problems) and _has_items(second, problems)):
        return {}
    try:
        return {row.task: row for row in quality_comparison.compare_quality(first.path, second.path)}
    except DAMAGED as error:
        problems[second.location] = f"not paired with {first.location}: {error}"
        return {}


def _timing(
    collection: Collection,
    entries: Sequence[StoredRecord[Latency]],
    baseline: str | None,
    scored: MeasuredCheckpoint | None,
    problems: _Problems,
) -> Timing | None:
    """The newest latency record that was timed in turns with the baseline, over any workload; else the newest one."""
    if not entries:
        return None
    for entry in entries:
        as_scored = builds.fits(entry, scored)
        for other in collection.select(Latency, baseline) if baseline else ():
            is_one_run = entry.record.run == other.record.run
            if not is_one_run or other.record.basis != entry.record.basis:
                continue
            if not (_has_items(entry, problems) and _has_items(other, problems)):
                continue
            try:
                tries = count_tries(other.path, entry.path)
                return Timing(entry, tuple(compare_latency(other.path, entry.path)), as_scored, tries)
            except DAMAGED as error:
                problems[entry.location] = f"its items give no speed-up: {error!r}"
    return Timing(entries[0], as_scored=builds.fits(entries[0], scored))


_ORDER = {"promoted": 0, "pass": 1, "inconclusive": 2, "measured": 3, "fail": 4, "rejected": 5}


def sort_rows(rows: Sequence[Row]) -> list[Row]:
    """Sort rows, the most promising first: promoted, pass, inconclusive, measured, fail, rejected; then by speed-up."""
    return sorted(
        rows, key=lambda row: (_ORDER.get(row.standing, 6), -speed_up(row), row.variant, row.hardware)
    )


def speed_up(row: Row) -> float:
    """Speed-up over all requests; 0 if it was not measured."""
    return row.timed.speed.speedup or 0.0 if row.timed and row.timed.speed else 0.0


def margins(gain: Margins) -> str:
    """A change in units of the margin, with its interval, as text: "-0.20 [-0.50, +0.10]"."""
    return f"{gain.value:+.2f} [{gain.low:+.2f}, {gain.high:+.2f}]"


def leaderboard_table(rows: Sequence[Row]) -> Table:
    """Table with a line for each row: standing, evidence, speed, worst task, scores, size, figures of other kinds."""
    tasks = dict.fromkeys(key for row in rows for key in row.scores)
    headings = dict.fromkeys(heading for row in rows for heading in row.figures)
    has_suites = len({suite for suite, _ in tasks}) > 1
    columns: dict[str, Callable[[Row], object]] = {
        "variant": lambda row: row.variant,
        "speed-up [95 %]": _speed_text,
        "worst task, in margins [95 %]": lambda row: (
            margins(row.worst) + f" {row.worst.task}" if row.worst else None
        ),
        "verdict": lambda row: "; ".join([row.standing, *row.doubts]),
        "evidence": lambda row: ", ".join(
            f"{each.kind.replace('_', ' ')} {each.verdict}{' (earlier checkpoint)' if each.is_stale else ''}"
            for each in row.evidence
            if each.verdict != "missing"
        ),
        "hardware": lambda row: row.hardware,
    }
    for suite, task in tasks:
        columns[f"{task} ({suite})" if has_suites else task] = partial(_score_text, (suite, task))
    columns["checkpoint, MB"] = lambda row: f"{row.size_bytes / 1e6:,.2f}" if row.size_bytes else None
    for heading in headings:
        columns[heading] = partial(_figure_text, heading)
    notes = (
        "Scores are ± one standard error, behind them the change against the baseline, paired by item. A margin is the "
        "loss that still counts as equal; the worst task is the one whose interval reaches furthest down. A speed-up "
        "is shown where both servers were timed in turns.",
        provenance.CPU_NOTE,
    )
    return Table.from_rows("Leaderboard", rows, columns, *notes, text_columns=6)


def _speed_text(row: Row) -> str | None:
    if row.timed is None:
        return None
    if row.timed.speed is None:
        return "not timed in turns" if row.baseline else None
    tries = row.timed.tries
    said = f", timing {tries}, interval widened for {tries} timings" if tries > 1 else ""
    return f"{row.timed.speed.ratio} ({row.timed.latency.record.workload}{said})"


def _score_text(key: tuple[str, str], row: Row) -> str | None:
    if (score := row.scores.get(key)) is None:
        return None
    text = f"{score.row.value:.3f} ± {score.row.standard_error:.3f}"
    if score.change:
        difference = score.change.difference
        text += (
            f" ({difference.value:+.3f} ± {difference.standard_error:.3f}, {score.change.judgement.verdict})"
        )
    return text


def _figure_text(heading: str, row: Row) -> str | None:
    if heading not in row.figures:
        return None
    figure, entry = row.figures[heading]
    text = f"{figure.value:,.4g}"
    if figure.low is not None and figure.high is not None:
        text += f" [{figure.low:,.4g}, {figure.high:,.4g}]"
    return text if hardware(entry) == row.hardware else f"{text} on {hardware(entry)}"
