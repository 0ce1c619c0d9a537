"""A ratio of two figures as records hold it."""

from typing import Self

from slimqwen.records.record import Block, NonNegative
from slimqwen.stats import intervals


class Ratio(Block):
    """A ratio with its 95 % interval."""

    value: NonNegative
    low: NonNegative
    high: NonNegative

    @classmethod
    def of_rounds(cls, numerator: list[float], denominator: list[float]) -> Self:
        """The ratio of one figure a round whose rounds took turns (`intervals.ratio_of_rounds`).

        Raises:
            TooFewItemsError: fewer than two rounds.
        """
        return cls.from_interval(intervals.ratio_of_rounds(numerator, denominator, in_turns=True))

    @classmethod
    def from_interval(cls, ratio: intervals.Ratio) -> Self:
        """The same ratio as a part of a record."""
        return cls(value=ratio.value, low=ratio.low, high=ratio.high)
