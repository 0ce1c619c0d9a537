"""Proof: finalists of a search are gated on items that the search never saw.

Whoever looks best of many on some items owes part of it to these items (the winner's curse), so each finalist is
gated on the others alone. A finalist has to pass every check, so its p-value is the largest of them (Berger 1982);
over finalists Holm's procedure (1979) keeps the probability that any finalist worse than a limit is promoted at or
below `non_inferiority.ALPHA`.
"""

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from slimqwen.evals import gate
from slimqwen.evals.gate import Gate
from slimqwen.records import store
from slimqwen.records.record import Block, Finding, RelativePath, Share, VariantName, Verdict
from slimqwen.records.split import split_of
from slimqwen.search import SearchError
from slimqwen.search.executors import Executor
from slimqwen.search.measurements import Options
from slimqwen.search.sweep import SweepResult, sweep
from slimqwen.stats import multiplicity
from slimqwen.stats.non_inferiority import ALPHA


class Finalist(Block):
    """A finalist and its gate on the items of the proof."""

    variant: VariantName
    verdict: Verdict = Field(
        description="pass: adjusted_p_value is at most alpha; fail: the proof's gate fails, or a check broke down."
    )
    reason: str | None = Field(description="Why it is not promoted; null where it is.")
    p_value: Share = Field(
        description="One-sided, of the hypothesis that a figure lies at or beyond its limit: the largest of all "
        "figures; 1 where a check broke down."
    )
    adjusted_p_value: Share = Field(description="The same over all finalists, by Holm's procedure.")
    findings: tuple[Finding, ...] = Field(description="Figures on the proof's items; empty without a gate.")
    record: RelativePath | None = Field(
        description="Its gate record, as <variant>/<file>; null without a gate."
    )

    @property
    def passed(self) -> bool:
        """Whether it may be served."""
        return self.verdict == Verdict.PASS


class Proof(Block):
    """The proof of all finalists of a search."""

    alpha: Share = Field(description="Largest probability that any finalist is promoted wrongly.")
    proof_share: Share | None = Field(
        description="Share of all items that the proof has; null where no gate ended."
    )
    finalists: tuple[Finalist, ...] = Field(min_length=1)


def prove_finalists(names: Sequence[str], executor: Executor, root: Path, *, command: Sequence[str]) -> Proof:
    """Gate finalists on the proof's items.

    The gates are a sweep, so a finalist whose engine crashes ends with its reason while the others go on, records that
    still hold are used again, and an interrupted proof goes on. Two calls with different finalists are two families of
    hypotheses, so choose all finalists before a single call.

    Args:
        names: the finalists: variants of the repository, each with a baseline and an EVALUATION.
        executor: entered here.

    Returns:
        The finalists in the order of the names, each with its adjusted verdict and its record.

    Raises:
        SlimqwenError: there is no finalist, one has no baseline or no usable config.env, or the executor cannot work.
    """
    if not names:
        raise SearchError("no finalist to prove; name at least one variant")
    results = sweep(names, Options(("gate",), tuple(command), limit=None, split="proof"), executor, root)
    gates = [None if each.failure else each.records["gate"][0] for each in results]
    p_values = [gate.gate_p_value(path) if path else 1.0 for path in gates]
    splits = [split_of(store.read_record(path)) for path in gates if path]
    return Proof(
        alpha=ALPHA,
        proof_share=splits[0].proof_share if splits and splits[0] else None,
        finalists=tuple(map(_judge_finalist, results, gates, p_values, multiplicity.holm(p_values))),
    )


def _judge_finalist(result: SweepResult, path: Path | None, p_value: float, adjusted: float) -> Finalist:
    """The verdict of a finalist: its gate passes, and its adjusted p-value is at most ALPHA."""
    findings: tuple[Finding, ...] = ()
    verdict, reasons = Verdict.FAIL, [result.failure] if result.failure else []
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
        variant=result.variant,
        verdict=verdict,
        reason="; ".join(reasons) or None,
        p_value=p_value,
        adjusted_p_value=adjusted,
        findings=findings,
        record=f"{path.parent.name}/{path.name}" if path else None,
    )
