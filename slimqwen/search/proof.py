"""Proof: finalists of a search are gated on items that the search never saw.

The best of many candidates owes part of its score to the items that selected it (the winner's curse), so finalists are
gated only on the other items. A finalist must pass every check, so its p-value is the largest of all figures (Berger
1982). Over the finalists Holm's procedure (1979) keeps the probability that any finalist worse than a limit is promoted
at or below `sequential.ALPHA`.
"""

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from slimqwen import variant as variants
from slimqwen.errors import SlimqwenError
from slimqwen.evals import gate
from slimqwen.evals.gate import Gate
from slimqwen.processes import Executor, Failure, Result, Task, run_tasks
from slimqwen.records import store
from slimqwen.records.record import Block, Finding, RelativePath, Share, VariantName, Verdict
from slimqwen.records.split import Side
from slimqwen.search import SearchError
from slimqwen.search.measurements import RecordSettings, check_task, gate_task, recipe_task
from slimqwen.stats import multiplicity
from slimqwen.stats.sequential import ALPHA
from slimqwen.variant import Variant


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
    findings: tuple[Finding, ...] = Field(description="Figures on the proof's items; empty without a gate.")
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


def prove_finalists(
    names: Sequence[str], executor: Executor, root: Path, *, command: Sequence[str], side: Side = "proof"
) -> Proof:
    """Gate finalists on the proof's items, or on the search's before a proof.

    If the engine of a finalist crashes, that finalist fails with the reason and the others go on. Records that still
    hold are reused, so an interrupted proof continues. Two calls with different finalists are two families of
    hypotheses: choose all finalists first and call once.

    Args:
        names: the finalists: variants of the repository, each with a baseline and an EVALUATION.
        executor: executor that is not entered yet; this function enters it.

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
    reasons: dict[str, list[str]] = {each.name: [] for each in finalists}
    with executor:
        for list_tasks in (_recipe_tasks, _check_tasks, _gate_tasks):
            tasks: dict[str, list[Task]] = {}
            for each in finalists:
                if reasons[each.name]:
                    continue
                try:
                    tasks[each.name] = list_tasks(each, settings)
                except SlimqwenError as error:
                    reasons[each.name].append(str(error))
            outcomes = run_tasks([task for of_one in tasks.values() for task in of_one], executor)
            for name, of_one in tasks.items():
                ended = [outcomes[task.key] for task in of_one]
                reasons[name] += dict.fromkeys(one.reason for one in ended if isinstance(one, Failure))
    gates = [
        outcome.value if isinstance(outcome := outcomes.get(f"gate of {name}"), Result) else None
        for name in reasons
    ]
    p_values = [gate.gate_p_value(path) if path else 1.0 for path in gates]
    splits = [store.read_record(path, Gate).split for path in gates if path]
    return Proof(
        alpha=ALPHA,
        proof_share=splits[0].proof_share if splits and splits[0] else None,
        finalists=tuple(map(_judge_finalist, reasons.items(), gates, p_values, multiplicity.holm(p_values))),
    )


def _recipe_tasks(finalist: Variant, _: RecordSettings) -> list[Task]:
    return [recipe_task(finalist)] if finalist.recipe else []


def _check_tasks(finalist: Variant, settings: RecordSettings) -> list[Task]:
    checks = settings.load_checks(finalist)
    for side in next(iter(checks.values())).pair.sides:
        side.require_weights()
    return [check_task(check, side, settings) for check in checks.values() for side in check.sides]


def _gate_tasks(finalist: Variant, settings: RecordSettings) -> list[Task]:
    return [gate_task(finalist, settings)]


def _judge_finalist(
    failed: tuple[str, Sequence[str]], path: Path | None, p_value: float, adjusted: float
) -> Finalist:
    """Judge a finalist, which passes if its gate passes and its adjusted p-value is at most ALPHA.

    Args:
        failed: name of the finalist, and the reasons of its tasks that failed.
        path: its gate record; None without one.
    """
    name, reasons = failed[0], ["; ".join(failed[1])] if failed[1] else []
    findings: tuple[Finding, ...] = ()
    verdict = Verdict.FAIL
    if path:
        verdict = store.read_record(path, Gate).verdict
        findings = tuple(map(Finding.model_validate, store.read_items(path)))
        reasons += [
            f"{each.gate}: {each.figure} {each.verdict}" for each in findings if each.verdict != Verdict.PASS
        ]
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
