"""Pairs of quality records of a variant and its baseline, and what they say beside the scores."""

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from slimqwen.errors import SlimqwenError
from slimqwen.evals import quality_comparison
from slimqwen.evals.checks.quality import find_response_limits
from slimqwen.evals.quality import Quality
from slimqwen.evals.runaways import compare_responses
from slimqwen.records.collection import Collection, StoredRecord
from slimqwen.stats.verdict import Verdict

DAMAGED = (SlimqwenError, ValueError, TypeError, KeyError)
"""Errors that reading or comparing items raises if they are damaged or from another version."""

Pair = tuple[StoredRecord[Quality], StoredRecord[Quality]]


def find_pairs(collection: Collection, variant: str, baseline: str | None) -> dict[str, Pair]:
    """Find, for each suite, the quality records of baseline and variant to compare, of the newest checkpoints only.

    Returns:
        Name of a suite -> the baseline's record, the variant's record; without suites that cannot be paired.
    """
    second, first = (
        quality_comparison.of_newest_checkpoint(collection.select(Quality, name) if name else ())
        for name in (variant, baseline)
    )
    pairs = {}
    for suite in sorted({entry.record.suite for entry in second}):
        pair = quality_comparison.best_pair(first, [each for each in second if each.record.suite == suite])
        if pair:
            pairs[suite] = pair
    return pairs


def judge_responses(root: Path, pairs: Mapping[str, Pair]) -> Iterable[Verdict]:
    """Yield verdicts on the share of responses that run away, for each suite whose gate limits them.

    Records whose items are damaged are left out.

    Args:
        pairs: records by suite, from `find_pairs`.
    """
    for suite, (first, second) in pairs.items():
        limits = find_response_limits(suite, root)
        with contextlib.suppress(*DAMAGED):  # damaged items are among the problems
            if limits and (compared := compare_responses(first.path, second.path, limits)):
                yield from compared.verdicts
