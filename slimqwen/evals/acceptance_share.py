"""Acceptance share: a variant's acceptance length relative to its baseline's, from two acceptance records."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slimqwen.evals.acceptance import Acceptance
from slimqwen.evals.drafting import Item, acceptance_lengths
from slimqwen.records import store
from slimqwen.records.pairing import NotComparableError, newest_pair, require_same
from slimqwen.records.record import MeasuredCheckpoint
from slimqwen.stats import intervals
from slimqwen.stats.estimates import Ratio
from slimqwen.stats.verdict import Verdict


@dataclass(frozen=True)
class AcceptanceShare:
    """A variant's acceptance length as a share of its baseline's, on the same prompts at the same depth.

    Attributes:
        depth: tokens drafted at a time (K).
        first: acceptance length of the baseline, tokens.
        second: acceptance length of the variant, tokens.
        ratio: second / first, with its interval over groups of prompts.
        groups: number of groups of prompts that both sides have.
        least_share: smallest ratio that passes.
        verdict: of the interval against `least_share`.
        p_value: one-sided, of the hypothesis that the ratio is at most `least_share`.
    """

    depth: int
    first: float
    second: float
    ratio: Ratio
    groups: int
    least_share: float
    verdict: Verdict
    p_value: float


def pair_acceptance_records(
    first: Path, second: Path, checkpoints: Sequence[MeasuredCheckpoint] | None = None
) -> tuple[Path, Path]:
    """Find the newest acceptance records of two variants with the same prompts and the same depth (K) at the gate.

    Args:
        first: folder of the first variant's records, experiments/<variant>.
        second: folder of the second variant's records.
        checkpoints: the two checkpoints that must have been measured, in this or another build; None for any.

    Raises:
        MissingRecordError: a variant has no such record.
        NotComparableError: no two of their records have the same settings.
    """

    def fits(record: Acceptance) -> bool:
        has_gate_depth = record.gate_depth in [row.depth for row in record.depths]
        measured = record.provenance.checkpoint
        return has_gate_depth and (
            checkpoints is None or any(measured.has_recipe_of(each) for each in checkpoints)
        )

    def command(variant: str, like: Acceptance) -> str:
        return f"slimqwen eval acceptance --variant {variant}"

    return newest_pair(first, second, Acceptance, command, fits)


def compare_acceptance(first: Path, second: Path) -> AcceptanceShare:
    """Compare two acceptance records at the draft depth (K) at which the second one was gated.

    Args:
        first: file of the baseline's record.
        second: file of the variant's record.

    Raises:
        NotComparableError: the records are of different splits, or share too few groups of prompts at that depth.
        RecordError: a record or its items are damaged.
    """
    baseline_record, record = (store.read_record(path, Acceptance) for path in (first, second))
    first_split, second_split = ({"split": each.basis["split"]} for each in (baseline_record, record))
    require_same(first, second, first_split, second_split, "")
    items = (store.read_items(path) for path in (first, second))
    return compare_drafts(*items, depth=record.gate_depth, least_share=record.least_share)


def compare_drafts(
    first: Sequence[Item], second: Sequence[Item], *, depth: int, least_share: float
) -> AcceptanceShare:
    """Compare the items of two acceptance records over the groups of greedy prompts that are in both.

    Args:
        first: items of the baseline.
        second: items of the variant.
        depth: tokens drafted at a time (K).
        least_share: smallest share of the baseline's acceptance length that passes.

    Raises:
        NotComparableError: the records share fewer than two groups at that depth.
    """
    groups = [_greedy_groups(items, depth) for items in (first, second)]
    shared = sorted(groups[0].keys() & groups[1].keys())
    if len(shared) < 2:
        raise NotComparableError(
            f"the two variants share fewer than two groups of greedy prompts at K = {depth}; measure both again by "
            "`slimqwen eval acceptance --variant NAME`"
        )
    (first_lengths, first_drafts), (second_lengths, second_drafts) = (
        acceptance_lengths([side[key] for key in shared]) for side in groups
    )
    sides = first_lengths, second_lengths, first_drafts, second_drafts
    ratio = intervals.paired_ratio(*sides)
    verdict = Verdict.from_interval(ratio.low, ratio.high, least_share, higher_is_better=True)
    return AcceptanceShare(
        depth=depth,
        first=intervals.mean(first_lengths, first_drafts).value,
        second=intervals.mean(second_lengths, second_drafts).value,
        ratio=ratio,
        groups=len(shared),
        least_share=least_share,
        verdict=verdict,
        p_value=intervals.paired_ratio_p_value(*sides, least_share),
    )


def _greedy_groups(items: Sequence[Item], depth: int) -> Mapping[tuple[str, int], Item]:
    return {
        (item["class"], item["group"]): item
        for item in items
        if item["depth"] == depth and item["temperature"] == 0 and item["drafts"]
    }
