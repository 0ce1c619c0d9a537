"""Decides which variant to serve on each hardware, and says why and what evidence is missing."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from slimqwen import variant as variants
from slimqwen.bench.latency import Latency
from slimqwen.evals.gate import Gate
from slimqwen.evals.quality import Quality
from slimqwen.records import collection, registry, store
from slimqwen.report.leaderboard import Row, margins, rows_of, sort_rows, speed_up


@dataclass(frozen=True)
class Choice:
    """Which variant of a baseline to serve on one hardware.

    Attributes:
        serve: row of the variant to serve; None if no variant passes every check and is faster by its whole interval.
        candidate: the most promising other row; None if every other measured variant failed or was rejected.
    """

    baseline: str
    hardware: str
    on_cpu: bool
    serve: Row | None
    candidate: Row | None

    @property
    def advice(self) -> list[str]:
        """Sentences: what to serve and why, then what evidence is missing and the command that measures it."""
        where = f"on {self.hardware}{' (a CPU is no evidence about a GPU)' if self.on_cpu else ''}"
        if self.serve is None:
            sentences = [f"Serve {self.baseline} {where}: no variant is proven as good and faster."]
        else:
            row = self.serve
            assert row.timed is not None
            assert row.timed.speed is not None
            worst = f"; worst task {row.worst.task} {margins(row.worst)} margins" if row.worst else ""
            workload = row.timed.latency.record.workload
            sentences = [
                f"Serve {row.variant} {where}: {row.timed.speed.ratio} as fast over the workload {workload}{worst}.",
                *(f"{row.variant}: {each.caution}." for each in row.evidence if each.caution),
                *(f"{row.variant}: {each}." for each in row.other_builds),
            ]
        if (other := self.candidate) is not None:
            doubts, missing = list(other.doubts), _missing_evidence(other)
            if other.standing == "inconclusive":
                doubts.insert(0, "its gate is inconclusive")
            if not doubts and not missing and other.timed and other.timed.speed:
                doubts = [f"{other.timed.speed.ratio} as fast"]
            if doubts:
                sentences.append(f"{other.variant}: {'; '.join(doubts)}.")
            if missing:
                what, command = missing
                sentences.append(f"{other.variant} lacks {what}: `{command}`.")
        return sentences


def _missing_evidence(row: Row) -> tuple[str, str] | None:
    """Name of the first evidence that a row lacks, and the command that measures it; None if nothing is missing."""
    for kind in row.missing:
        if kind == Latency.kind:
            break
        return f"a current {kind} record", measuring_command(row, kind)
    if row.timed is None or row.timed.speed is None:
        return "a timing in turns with its baseline", measuring_command(row, Latency.kind)
    return None


def measuring_command(row: Row, kind: str) -> str:
    """The command that measures a variant comparably with its baseline: on the same suite, or timed in turns."""
    command = registry.kinds()[kind].making_command(row.variant)
    if kind == Latency.kind and row.baseline:
        return f"{command} --baseline"
    return (
        f"{command} --suite {next(iter(row.scores))[0]}" if kind == Quality.kind and row.scores else command
    )


def collect_choices(root: Path) -> list[Choice]:
    """Apply `choose_variants` to the records of a repository."""
    records = collection.collect(root)
    return choose_variants([row for name in variants.names(root) for row in rows_of(records, name)[0]])


def list_other_builds(subjects: Iterable[variants.Variant]) -> list[str]:
    """Phrases that name the newest records of another build of a variant than the one on this machine."""
    return [
        f"{one.name}: {phrase}"
        for one in subjects
        for phrase in rows_of(collection.collect(one.root), one.name)[0][0].other_builds
    ]


def list_unjudged(root: Path) -> list[str]:
    """Names of variants that have a baseline and a checkpoint on this machine, but no gate record."""
    loaded = (variants.load(name, root) for name in variants.names(root))
    made = (one for one in loaded if one.baseline and one.weights.is_dir())
    return [one.name for one in made if not any(store.records(one.folder, Gate))]


def choose_variants(rows: Sequence[Row]) -> list[Choice]:
    """Decide what to serve, for every baseline and hardware with a measured variant."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in sort_rows(rows):
        if row.baseline and row.is_measured:
            groups.setdefault(row.group, []).append(row)
    choices = []
    for (baseline, machine), members in sorted(groups.items(), key=lambda group: (-len(group[1]), group[0])):
        proven = [
            row
            for row in members
            if row.standing in ("promoted", "pass")
            and row.passed_quality
            and row.timed
            and row.timed.is_faster
            and not row.doubts
        ]
        serve = min(proven, key=lambda row: (row.status != "promoted", -speed_up(row)), default=None)
        others = (row for row in members if row is not serve and row.standing not in ("fail", "rejected"))
        choices.append(Choice(baseline, machine, members[0].on_cpu, serve, next(others, None)))
    return choices
