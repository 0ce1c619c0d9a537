"""How long a variant's drafts are accepted against its baseline's, from what was counted of both."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimqwen.evaluation import statistics
from slimqwen.evaluation.comparison import NotComparableError
from slimqwen.evaluation.verdict import Verdict
from slimqwen.records import store


@dataclass(frozen=True)
class Share:
    """A variant's acceptance length as a share of its baseline's, on the same prompts at the same depth.

    Attributes:
        depth: tokens drafted at a time (K).
        first: the baseline's acceptance length.
        second: the variant's.
        ratio: second / first, its interval over groups of prompts.
        groups: how many.
        verdict: of the ratio against the plan's least share.
    """

    depth: int
    first: float
    second: float
    ratio: statistics.Ratio
    groups: int
    verdict: Verdict


def pair(first: Path, second: Path, digests: Sequence[str] | None = None) -> tuple[Path, Path]:
    """The newest acceptance records of two variants' folders that count the same prompts at the gate's depth.

    Args:
        first: experiments/<baseline>.
        second: experiments/<variant>.
        digests: of the two checkpoints that the records must be of; any by default.

    Raises:
        MissingRecordError: a variant has none.
        NotComparableError: none of the one fits any of the other.
    """

    def fitting(folder: Path, digest: str | None) -> dict[Path, Any]:
        found = {}
        for path in store.records(folder, "acceptance"):
            record = store.read(path)
            of = record["provenance"]
            depths = [row["depth"] for row in record["depths"]]
            if record["gate_depth"] in depths and digest in (None, of["checkpoint"]["digest"]):
                found[path] = (record["plan"], record["gate_depth"], of["datasets"])
        if not found:
            raise store.MissingRecordError(
                f"no acceptance record that fits in {folder.parent.name}/{folder.name}; "
                f"`make sweep-k VARIANT={folder.name}` makes one"
            )
        return found

    ours, theirs = (
        fitting(folder, digest)
        for folder, digest in zip((first, second), digests or (None, None), strict=True)
    )
    for path, basis in ours.items():
        for other, other_basis in theirs.items():
            if basis == other_basis:
                return path, other
    raise NotComparableError(
        f"no acceptance record of {first.name} and {second.name} is of the same plan; "
        f"`make sweep-k VARIANT={second.name}` makes one"
    )


def compare(first: Path, second: Path) -> Share:
    """Pair two acceptance records, the baseline's first; the second's depth and least share are the gate's.

    Raises:
        NotComparableError: they share too few groups of prompts at that depth.
        RecordError: a record or its items are damaged.
    """
    record = store.read(second)
    items = (store.read_items(path) for path in (first, second))
    return judge(*items, depth=record["gate_depth"], least_share=record["least_share"])


def judge(
    first: Sequence[Mapping[str, Any]],
    second: Sequence[Mapping[str, Any]],
    *,
    depth: int,
    least_share: float,
) -> Share:
    """Pair counted items, the baseline's first, by the groups of greedy prompts that both have.

    Args:
        first: the baseline's, as `count` returns them.
        second: the variant's.
        depth: tokens drafted at a time (K).
        least_share: of the baseline's acceptance length that still passes.

    Raises:
        NotComparableError: they share too few groups at that depth.
    """
    a, b = (_greedy_groups(items, depth) for items in (first, second))
    both = sorted(a.keys() & b.keys())
    if len(both) < 2:
        raise NotComparableError(f"no greedy prompts were counted with both at K = {depth}; count both again")
    sides = [[of[key] for key in both] for of in (a, b)]
    (first_lengths, first_drafts), (second_lengths, second_drafts) = map(lengths, sides)
    ratio = statistics.paired_ratio(first_lengths, second_lengths, first_drafts, second_drafts)
    verdict = Verdict.INCONCLUSIVE
    if ratio.low >= least_share:
        verdict = Verdict.PASS
    elif ratio.high < least_share:
        verdict = Verdict.FAIL
    first_length, second_length = (statistics.mean(*lengths(side)).value for side in sides)
    return Share(depth, first_length, second_length, ratio, len(both), verdict)


def lengths(items: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[int]]:
    """The acceptance length of each group, and the drafts that it stands on."""
    drafts = [item["drafts"] for item in items]
    return [1 + sum(item["accepted_per_position"]) / item["drafts"] for item in items], drafts


def _greedy_groups(items: Sequence[Mapping[str, Any]], depth: int) -> dict[Any, Mapping[str, Any]]:
    return {
        (item["class"], item["group"]): item
        for item in items
        if item["depth"] == depth and item["temperature"] == 0 and item["drafts"]
    }
