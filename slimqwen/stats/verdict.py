"""Verdicts: pass, fail or inconclusive, from an interval and a limit that was fixed before the run.

A run passes only if the whole interval lies on the right side of the limit, and fails only if the whole interval lies
on the wrong side; a run too small to show a difference is inconclusive.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Self


class Verdict(StrEnum):
    """Outcome of a check: pass, fail or inconclusive."""

    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"

    @classmethod
    def from_interval(
        cls, low: float, high: float, limit: float, *, higher_is_better: bool, limit_passes: bool = True
    ) -> Self:
        """Compare an interval with a limit: inconclusive if the interval has parts on both sides.

        Args:
            low, high: ends of the interval.
            higher_is_better: whether figures above the limit pass.
            limit_passes: whether an interval that ends exactly at the limit passes.
        """
        worst, best, bound = (low, high, limit) if higher_is_better else (-high, -low, -limit)
        if worst > bound or (limit_passes and worst == bound):
            return cls("pass")
        return cls("fail" if best < bound else "inconclusive")


def overall(verdicts: Sequence[Verdict]) -> Verdict:
    """Fail if any failed; else inconclusive if any is inconclusive or there are none; else pass."""
    if Verdict.FAIL in verdicts:
        return Verdict.FAIL
    if Verdict.INCONCLUSIVE in verdicts or not verdicts:
        return Verdict.INCONCLUSIVE
    return Verdict.PASS
