"""Verdicts: pass, fail or inconclusive, from an interval and the limit that was written down before the run.

A run that could not have seen a difference says nothing: it passes only where the whole interval lies on the right side
of the limit, and fails only where the whole interval lies on the wrong side.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Self


class Verdict(StrEnum):
    """Outcome of a check."""

    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"

    @classmethod
    def from_interval(
        cls, low: float, high: float, limit: float, *, higher_is_better: bool, limit_passes: bool = True
    ) -> Self:
        """Compare an interval with a limit.

        Args:
            limit: in the unit of the interval.
            higher_is_better: whether figures above the limit pass.
            limit_passes: whether an interval that ends exactly at the limit passes.
        """
        worst, best, bound = (low, high, limit) if higher_is_better else (-high, -low, -limit)
        if worst > bound or (limit_passes and worst == bound):
            return cls("pass")
        return cls("fail" if best < bound else "inconclusive")


def overall(verdicts: Sequence[Verdict]) -> Verdict:
    """Fail where one failed, else inconclusive where one is inconclusive or there is none, else pass."""
    if Verdict.FAIL in verdicts:
        return Verdict.FAIL
    if Verdict.INCONCLUSIVE in verdicts or not verdicts:
        return Verdict.INCONCLUSIVE
    return Verdict.PASS
