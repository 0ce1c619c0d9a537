"""Proof: finalists of a search are gated on items that the search never saw.

Whoever looks best of many on some items owes part of it to these items (the winner's curse). So each finalist is
gated on the search's items (before) and on the others (after), and the others alone decide. A finalist has to pass
every check, so its p-value is the largest of them (Berger 1982); over finalists Holm's procedure (1979) keeps the
probability that any finalist worse than a limit is promoted at or below `non_inferiority.ALPHA`.
"""

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from slimqwen.evals import gate
from slimqwen.evals.gate import Gate
from slimqwen.records import store
from slimqwen.records.record import Block, Finding, RelativePath, Share, VariantName, Verdict
from slimqwen.records.split import Side, split_of
from slimqwen.search import SearchError
from slimqwen.search.executors import Executor
from slimqwen.search.sweep.driver import SweepResult, sweep
from slimqwen.search.sweep.required_tasks import Options
from slimqwen.stats import multiplicity
from slimqwen.stats.non_inferiority import ALPHA


class Finalist(Block):
    """A finalist before and after: its gate on the search's items and on those of the proof."""

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
    before: tuple[Finding, ...] = Field(description="Figures on the search's items; empty without a gate.")
    after: tuple[Finding, ...] = Field(description="Figures on the proof's items; empty without a gate.")
    records: tuple[RelativePath, ...] = Field(
        description="Gate records of the search's and the proof's items, as <variant>/<file>, as far as there are."
    )


class Proof(Block):
    """The proof of all finalists of a search."""

    alpha: Share = Field(description="Largest probability that any finalist is promoted wrongly.")
    proof_share: Share | None = Field(
        description="Share of all items that the proof has; null where no gate ended."
    )
    finalists: tuple[Finalist, ...] = Field(min_length=1)

    @property
    def promoted(self) -> list[str]:
        """The finalists that passed, in their order."""
        return [each.variant for each in self.finalists if each.verdict == Verdict.PASS]


def prove(names: Sequence[str], executor: Executor, root: Path, *, command: Sequence[str]) -> Proof:
    """Gate finalists on the search's items and on the proof's, and judge them by the latter alone.

    Both gates are sweeps (`sweep.driver`), so a finalist whose engine crashes ends with its reason while the others go
    on, records that still hold are used again, and an interrupted proof goes on. Gate records are written to
    experiments/ of the repository. Two calls with different finalists are two families of hypotheses, so
    choose all finalists before a single call.

    Args:
        names: the finalists: variants of the repository, each with a baseline and an EVALUATION.
        executor: entered here, once for each side of the split.

    Returns:
        The finalists in the order of the names, each with both estimates, its adjusted verdict and its records.

    Raises:
        SlimqwenError: there is no finalist, one has no baseline or no usable config.env, or the executor cannot work.
    """
    names = list(dict.fromkeys(names))
    if not names:
        raise SearchError("no finalist to prove; name at least one variant")

    def gate_results(side: Side, variants: Sequence[str]) -> dict[str, SweepResult]:
        options = Options(("gate",), tuple(command), limit=None, split=side)
        results = sweep(variants, options, executor, root) if variants else []
        return {each.variant: each for each in results}

    before = gate_results("search", names)
    after = gate_results("proof", [name for name in names if not before[name].failure])
    records = {name: each.records[-1] for name, each in after.items() if not each.failure}
    p_values = [gate.p_value(records[name]) if name in records else 1.0 for name in names]
    adjusted = multiplicity.holm(p_values)
    shares = [split_of(store.read(path)) for path in records.values()]
    return Proof(
        alpha=ALPHA,
        proof_share=shares[0].proof_share if shares and shares[0] else None,
        finalists=tuple(
            _finalist(before[name], after.get(name), p_value, adjusted_p_value)
            for name, p_value, adjusted_p_value in zip(names, p_values, adjusted, strict=True)
        ),
    )


def _finalist(before: SweepResult, after: SweepResult | None, p_value: float, adjusted: float) -> Finalist:
    gates = [each for each in (before, after) if each is not None]
    paths = [each.records[-1] for each in gates if not each.failure]
    verdict, reason = Verdict.FAIL, gates[-1].failure
    if len(paths) == 2:
        verdict, reason = _adjusted_verdict(paths[-1], adjusted)
    return Finalist(
        variant=before.variant,
        verdict=verdict,
        reason=reason,
        p_value=p_value,
        adjusted_p_value=adjusted,
        before=_findings(before),
        after=_findings(after) if after else (),
        records=tuple(f"{path.parent.name}/{path.name}" for path in paths),
    )


def _adjusted_verdict(path: Path, adjusted: float) -> tuple[Verdict, str | None]:
    """The adjusted verdict of a proof's gate, and the reason where it does not promote."""
    record = store.read(path, Gate)
    if record.verdict == Verdict.PASS and adjusted <= ALPHA:
        return Verdict.PASS, None
    reasons = [
        f"{each.gate}: {each.figure} {each.verdict}"
        for each in map(Finding.model_validate, store.read_items(path))
        if each.verdict != Verdict.PASS
    ]
    if record.verdict == Verdict.FAIL:
        return Verdict.FAIL, "; ".join(reasons)
    reasons.append(f"adjusted p-value {adjusted:.3g} above {ALPHA:g}")
    return Verdict.INCONCLUSIVE, "; ".join(reasons)


def _findings(result: SweepResult) -> tuple[Finding, ...]:
    if result.failure:
        return ()
    return tuple(map(Finding.model_validate, store.read_items(result.records[-1])))
