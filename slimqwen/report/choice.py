"""Decides which variant to serve, by one rule for every verb; says why, and what evidence is missing.

`decide` is the rule. The page, `compare` and `promote` apply it to the records of experiments/ and demo/ on each
hardware, the demo to its own records, `search` to a finalist's proof and modelled speed, `tune` to ways to speculate.
"""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from slimqwen import variant as variants
from slimqwen.bench.latency import Latency
from slimqwen.evals.gate import Gate
from slimqwen.evals.quality import Quality
from slimqwen.records import collection, provenance, registry, store
from slimqwen.report.builds import find_made_checkpoint
from slimqwen.report.leaderboard import Row, margins, rows_of, sort_rows, speed_up
from slimqwen.stats.verdict import Verdict

DEMO = "demo"
"""Folder of the repository for the records of `slimqwen demo`."""

Goal = Literal["speed", "memory"]
"""What a variant is made for: to be faster than its baseline, or smaller."""


@dataclass(frozen=True)
class Case:
    """The evidence on a variant, from which `decide` chooses between it and its baseline.

    Attributes:
        variant: name of the variant.
        baseline: name of the variant that is served otherwise.
        verdict: verdict of all checks together; None if a check has none.
        is_faster: whether the whole interval of its speed-up is above 1; None if it was not timed with its baseline.
            For the goal memory, whether its checkpoint is smaller.
        unchecked: checks without a verdict.
        doubts: further reasons not to serve it, such as records of another checkpoint.
    """

    variant: str
    baseline: str
    verdict: Verdict | None
    is_faster: bool | None
    unchecked: Sequence[str] = ()
    doubts: Sequence[str] = ()
    goal: Goal = "speed"


@dataclass(frozen=True)
class Decision:
    """The answer of `decide`.

    Attributes:
        serve: name of the variant to serve.
        reason: why, in words.
        is_final: whether no further measurement is needed.
    """

    serve: str
    reason: str
    is_final: bool = True


def decide(case: Case) -> Decision:
    """Choose the variant if all checks passed and the whole interval of its speed-up is above 1, else the baseline.

    For the goal memory a smaller checkpoint counts in place of speed.
    """
    variant, baseline = case.variant, case.baseline
    if case.verdict == Verdict.FAIL:
        return Decision(baseline, f"{variant} lost more than a limit allows")
    if case.doubts:
        return Decision(baseline, f"{variant}: {'; '.join(case.doubts)}")
    if case.unchecked or case.verdict is None:
        missing = ", ".join(case.unchecked) or "its quality"
        return Decision(baseline, f"not decided: no verdict on {missing}", is_final=False)
    if case.verdict == Verdict.INCONCLUSIVE:
        reason = f"not decided: `slimqwen gate --variant {variant}` goes on with all items"
        return Decision(baseline, reason, is_final=False)
    if case.is_faster is None:
        return Decision(baseline, f"not decided: {variant} is as good, but was not timed", is_final=False)
    if not case.is_faster:
        lacking = "not surely faster here" if case.goal == "speed" else "not smaller"
        return Decision(baseline, f"{variant} is as good, but {lacking}")
    gain = "faster" if case.goal == "speed" else "smaller"
    return Decision(variant, f"{gain}; no check saw a loss beyond its limit")


def case_of(row: Row) -> Case:
    """Collect the evidence on a variant on one hardware; the verdict is a person's, else the newest gate record's."""
    verdict = Verdict.PASS if row.status == "promoted" else None
    if verdict is None and row.verdict:
        verdict = Verdict(row.verdict)
    if verdict is None:
        gated = [each.verdict for each in row.evidence if each.kind == Gate.kind and not each.is_stale]
        verdict = next((Verdict(each) for each in gated if each != "missing"), None)
    unchecked = [] if row.passed_quality else [Quality.kind]
    is_faster = row.timed.is_faster if row.timed and row.timed.speed else None
    doubts = [*object_to(row.status), *row.doubts]
    return Case(row.variant, row.baseline or row.variant, verdict, is_faster, unchecked, doubts)


def object_to(status: str) -> list[str]:
    """A sentence if a person rejected the variant in its measurements.json; otherwise empty."""
    return ["its measurements.json says rejected"] if status == "rejected" else []


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
            workload, tries = row.timed.latency.record.workload, row.timed.tries
            said = (
                f" (timing {tries} of this pair, interval widened for {tries} timings)" if tries > 1 else ""
            )
            sentences = [
                f"Serve {row.variant} {where}: {row.timed.speed.ratio} as fast over the workload {workload}"
                f"{said}{worst}.",
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
    """The command that measures a variant comparably with its baseline: on the same suite, or timed in turns.

    Args:
        row: the variant's row.
        kind: record kind to measure, such as quality or latency.
    """
    command = registry.kinds()[kind].making_command(row.variant)
    if kind == Latency.kind and row.baseline:
        return f"{command} --baseline"
    return (
        f"{command} --suite {next(iter(row.scores))[0]}" if kind == Quality.kind and row.scores else command
    )


def collect_choices(root: Path) -> list[Choice]:
    """Decide what to serve, for every baseline and hardware in the records of a repository and of the demo.

    The user's own variants and baselines come first.
    """
    records = collection.collect(root, demo=DEMO)
    rows = [row for name in variants.local_names(root) for row in rows_of(records, name)[0]]
    return put_own_first(choose_variants(rows), rows, provenance.own_variants(root))


def put_own_first(choices: Sequence[Choice], rows: Sequence[Row], own: Set[str]) -> list[Choice]:
    """Sort the choices so that those about the user's own variants or baselines come before those of shipped ones.

    Args:
        choices: the choices; their order is otherwise kept.
        rows: rows of all variants, which say what baseline a variant has.
        own: names of the user's own variants.
    """
    baselines = {row.baseline for row in rows if row.variant in own} | own
    return sorted(choices, key=lambda each: each.baseline not in baselines)


def advise_here(root: Path, baseline: str) -> list[str]:
    """Sentences about which variant of a baseline to serve on this machine, and what evidence is missing.

    If no variant of it was measured on this hardware, the advice is to serve the baseline.
    """
    here = provenance.hardware_name(provenance.hardware())
    choices = [each for each in collect_choices(root) if (each.baseline, each.hardware) == (baseline, here)]
    return [sentence for each in choices for sentence in each.advice] or [
        f"Serve {baseline} on {here}: no variant of it was measured here."
    ]


def decide_here(variant: variants.Variant, goal: Goal = "speed") -> Decision:
    """Decide by their records whether to serve a variant or its baseline on this machine."""
    here = provenance.hardware_name(provenance.hardware())
    records = collection.collect(variant.root)
    rows = rows_of(records, variant.name)[0]
    case = case_of(next((row for row in rows if row.hardware == here), rows[0]))
    if goal == "memory":
        before = rows_of(records, case.baseline)[0][0].size_bytes
        is_smaller = bool(rows[0].size_bytes and before and rows[0].size_bytes < before)
        case = replace(case, goal=goal, is_faster=is_smaller)
    return decide(case)


def judged_by_gate(variant: variants.Variant) -> tuple[Path, Gate] | None:
    """Find the newest gate record of a variant's present checkpoint or another build of it; None without one."""
    present = find_made_checkpoint(variant.root, variant.name)
    for path, record in store.comparable(store.records(variant.folder, Gate), Gate, lambda _: True):
        if present is None or record.provenance.checkpoint.has_recipe_of(present):
            return path, record
    return None


def list_other_builds(subjects: Iterable[variants.Variant]) -> list[str]:
    """Phrases that name the record kinds last measured on another build than the checkpoint on this machine."""
    return [
        f"{one.name}: {phrase}"
        for one in subjects
        for phrase in rows_of(collection.collect(one.root), one.name)[0][0].other_builds
    ]


def list_unjudged(root: Path) -> list[str]:
    """Names of variants that have a baseline and a checkpoint here, but no gate record; the user's own come first."""
    own = provenance.own_variants(root)
    names = sorted(variants.local_names(root), key=lambda name: (name not in own, name))
    loaded = (variants.load(name, root) for name in names)
    made = (one for one in loaded if one.baseline and one.weights.is_dir())
    return [one.name for one in made if not any(store.records(one.folder, Gate))]


def choose_variants(rows: Sequence[Row]) -> list[Choice]:
    """Decide what to serve, for every baseline and hardware with a measured variant.

    Of several variants that pass every check and are surely faster, a promoted one is chosen, else the fastest. If none
    does, `Choice.serve` is None, and the baseline stays.

    Args:
        rows: rows of all variants.

    Returns:
        A choice for each baseline and hardware, those of most variants first.
    """
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in sort_rows(rows):
        if row.baseline and row.is_measured:
            groups.setdefault(row.group, []).append(row)
    choices = []
    for (baseline, machine), members in sorted(groups.items(), key=lambda group: (-len(group[1]), group[0])):
        proven = [row for row in members if decide(case_of(row)).serve == row.variant]
        serve = min(proven, key=lambda row: (row.status != "promoted", -speed_up(row)), default=None)
        others = (row for row in members if row is not serve and row.standing not in ("fail", "rejected"))
        choices.append(Choice(baseline, machine, members[0].on_cpu, serve, next(others, None)))
    return choices
