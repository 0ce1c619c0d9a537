"""Proof: finalists of a search are gated on items that the search never saw.

The best of many candidates owes part of its score to the items that selected it (the winner's curse), so finalists are
gated only on the other items. A finalist must pass every check, so its p-value is the largest of all figures (Berger
1982). Over the finalists Holm's procedure (1979) keeps the probability that any finalist worse than a limit is promoted
at or below `sequential.ALPHA`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field

from slimqwen import variant as variants
from slimqwen.errors import SlimqwenError
from slimqwen.evals import gate
from slimqwen.evals.checks import CHECKS
from slimqwen.evals.gate import Gate
from slimqwen.processes import Executor, Failure, Result, Task, run_tasks
from slimqwen.records import store
from slimqwen.records.record import Block, Finding, RelativePath, Share, VariantName, Verdict
from slimqwen.records.split import Side
from slimqwen.search import SearchError
from slimqwen.search.measurements import RecordSettings, check_task, gate_task, recipe_task
from slimqwen.stats import multiplicity
from slimqwen.stats.sequential import ALPHA
from slimqwen.stats.verdict import overall
from slimqwen.variant import Variant

ListTasks = Callable[[Variant, RecordSettings], list[Task]]
"""Lists the tasks of a finalist in a round; raises a SlimqwenError where they cannot begin."""


class Finalist(Block):
    """A finalist and its gate on the items of the proof."""

    variant: VariantName
    verdict: Verdict = Field(
        description="pass: adjusted_p_value is at most alpha; fail: the proof's gate fails, or a check broke down."
    )
    reason: str | None = Field(description="Why the finalist is not promoted; null if it is.")
    p_value: Share = Field(
        description="One-sided, of the hypothesis that a figure is at or beyond its limit: the largest of all "
        "figures; 1 if a check broke down."
    )
    adjusted_p_value: Share = Field(description="p_value adjusted over all finalists by Holm's procedure.")
    findings: tuple[Finding, ...] = Field(
        description="Figures on the proof's items; without a gate those of the check that failed, if one did."
    )
    record: RelativePath | None = Field(description="Gate record, <variant>/<file>; null without a gate.")

    @property
    def passed(self) -> bool:
        """Whether the finalist passed the proof."""
        return self.verdict == Verdict.PASS


class Proof(Block):
    """The proof of all finalists of a search."""

    alpha: Share = Field(description="Largest probability that any finalist is promoted wrongly.")
    proof_share: Share | None = Field(
        description="Share of items on the proof's side; null if no gate ended."
    )
    finalists: tuple[Finalist, ...] = Field(min_length=1)


@dataclass
class Climb:
    """What `climb` found about one variant: its checks are run in order, up to the first that does not pass.

    Attributes:
        reasons: why no further check was run; empty if nothing failed.
        findings: figures of the checks that were measured.
        failed: figures of the check that failed; empty if none did.
    """

    reasons: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    failed: Sequence[Finding] = ()


def climb(
    names: Sequence[str], checks: Sequence[str], executor: Executor, settings: RecordSettings, root: Path
) -> dict[str, Climb]:
    """Make the checkpoint of each variant, then run one check after the other on the variants that failed none so far.

    A variant drops out when its recipe or a measurement breaks down, or when a check's verdict is fail.

    Args:
        names: variants of the repository, each with a baseline and an EVALUATION.
        checks: names of the checks, in the order in which they run.
        executor: runs the measurements; the caller has entered it.
        settings: command, folder and side of the split of the records that the checks write.
        root: the repository.

    Returns:
        How far each variant came, by its name.
    """
    climbs = {name: Climb() for name in names}
    climbing = [variants.load(name, root) for name in climbs]
    reasons = {name: each.reasons for name, each in climbs.items()}
    _run_round(_recipe_tasks, climbing, settings, reasons, executor)
    for check in checks:
        values = _run_round(partial(_check_tasks, only=check), climbing, settings, reasons, executor)
        for name, measured in values.items():
            try:
                paths = [path for each in measured for path in each.paths]
                found = list(settings.load_checks(variants.load(name, root))[check].findings(paths))
            except SlimqwenError as error:
                reasons[name].append(str(error))
                continue
            climbs[name].findings += found
            if overall([each.verdict for each in found]) == Verdict.FAIL:
                climbs[name].failed = found
                reasons[name].extend(_name_failures(found))
    return climbs


def prove_finalists(
    names: Sequence[str],
    executor: Executor,
    root: Path,
    *,
    command: Sequence[str],
    side: Side = "proof",
    first_failure_ends: bool = False,
) -> Proof:
    """Gate finalists on the proof's side of the items; with `side="search"`, on the search's side before a proof.

    If the engine of a finalist crashes, that finalist fails with the reason and the others go on. Records whose inputs
    are unchanged are reused, so an interrupted proof continues. Two calls with different finalists are two families of
    hypotheses: choose all finalists first and call once.

    Args:
        names: the finalists: variants of the repository, each with a baseline and an EVALUATION.
        executor: runs the measurements; this function enters it.
        command: command line that the records state as their origin.
        side: side of the split whose items are measured.
        first_failure_ends: whether the first failed check, in the order of `CHECKS`, ends a finalist, without a gate
            record. This saves the hours of quality where fidelity fails within seconds.

    Returns:
        The finalists in the order of `names`, each with its adjusted verdict and its record.

    Raises:
        SlimqwenError: there is no finalist, a finalist has no baseline or no usable config.env, or the executor cannot
            work.
    """
    if not names:
        raise SearchError("no finalist to prove; name at least one variant")
    finalists = [variants.load(name, root) for name in dict.fromkeys(names)]
    for each in finalists:
        if each.baseline is None:
            raise SearchError(f"{each.name} has no baseline to compare with; name variants that have one")
    settings = RecordSettings(tuple(command), split_side=side)
    checks = [check.name for check in CHECKS] if first_failure_ends else []
    with executor:
        climbs = climb([each.name for each in finalists], checks, executor, settings, root)
        reasons = {name: each.reasons for name, each in climbs.items()}
        if not checks:
            _run_round(_check_tasks, finalists, settings, reasons, executor)
        values = _run_round(_gate_tasks, finalists, settings, reasons, executor)
    gates: list[Path | None] = [next(iter(values.get(name, ())), None) for name in reasons]
    p_values = [gate.gate_p_value(path) if path else 1.0 for path in gates]
    splits = [store.read_record(path, Gate).split for path in gates if path]
    return Proof(
        alpha=ALPHA,
        proof_share=splits[0].proof_share if splits and splits[0] else None,
        finalists=tuple(
            _judge_finalist(name, reasons[name], climbs[name].failed, path, p_value, adjusted)
            for name, path, p_value, adjusted in zip(
                reasons, gates, p_values, multiplicity.holm(p_values), strict=True
            )
        ),
    )


def _run_round(
    list_tasks: ListTasks,
    finalists: Sequence[Variant],
    settings: RecordSettings,
    reasons: Mapping[str, list[str]],
    executor: Executor,
) -> dict[str, list[Any]]:
    """Run the tasks of every finalist for which nothing failed yet; add to `reasons` what fails.

    Returns:
        The values of a finalist's tasks by its name, where none failed.
    """
    tasks: dict[str, list[Task]] = {}
    for each in finalists:
        if not reasons[each.name]:
            try:
                tasks[each.name] = list_tasks(each, settings)
            except SlimqwenError as error:
                reasons[each.name].append(str(error))
    outcomes = run_tasks([task for of_one in tasks.values() for task in of_one], executor)
    values: dict[str, list[Any]] = {}
    for name, of_one in tasks.items():
        ended = [outcomes[task.key] for task in of_one]
        reasons[name].extend(dict.fromkeys(one.reason for one in ended if isinstance(one, Failure)))
        if not reasons[name]:
            values[name] = [one.value for one in ended if isinstance(one, Result)]
    return values


def _recipe_tasks(finalist: Variant, _: RecordSettings) -> list[Task]:
    return [recipe_task(finalist)] if finalist.recipe else []


def _check_tasks(finalist: Variant, settings: RecordSettings, only: str = "") -> list[Task]:
    checks = settings.load_checks(finalist)
    for side in next(iter(checks.values())).pair.sides:
        side.require_weights()
    chosen = [checks[only]] if only else checks.values()
    return [check_task(check, side, settings) for check in chosen for side in check.sides]


def _gate_tasks(finalist: Variant, settings: RecordSettings) -> list[Task]:
    return [gate_task(finalist, settings)]


def _name_failures(findings: Sequence[Finding]) -> list[str]:
    return [f"{each.gate}: {each.figure} {each.verdict}" for each in findings if each.verdict != Verdict.PASS]


def _judge_finalist(
    name: str,
    failures: Sequence[str],
    failed: Sequence[Finding],
    path: Path | None,
    p_value: float,
    adjusted: float,
) -> Finalist:
    """Judge a finalist, which passes if its gate passes and its adjusted p-value is at most ALPHA.

    Args:
        failures: what failed before a gate.
        failed: figures of a check that failed before a gate.
        path: its gate record; None without one.
    """
    reasons = ["; ".join(failures)] if failures else []
    findings = tuple(failed)
    verdict = Verdict.FAIL
    if path:
        verdict = store.read_record(path, Gate).verdict
        findings = tuple(map(Finding.model_validate, store.read_items(path)))
        reasons += _name_failures(findings)
        if verdict != Verdict.FAIL and (verdict != Verdict.PASS or adjusted > ALPHA):
            verdict = Verdict.INCONCLUSIVE
            reasons.append(f"adjusted p-value {adjusted:.3g} above {ALPHA:g}")
    return Finalist(
        variant=name,
        verdict=verdict,
        reason="; ".join(reasons) or None,
        p_value=p_value,
        adjusted_p_value=adjusted,
        findings=findings,
        record=f"{path.parent.name}/{path.name}" if path else None,
    )
