"""Figures with their uncertainty, as records hold them: a mean, a paired difference, a ratio.

The module needs neither NumPy nor SciPy, because `slimqwen serve` reads records and importing both takes a second.
"""

from dataclasses import dataclass
from statistics import NormalDist
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

CONFIDENCE_LEVEL = 0.95
Z = NormalDist().inv_cdf((1 + CONFIDENCE_LEVEL) / 2)
"""Standard errors from a mean to the end of its interval, under the normal approximation."""

_AS_IN_RECORDS = ConfigDict(extra="forbid", allow_inf_nan=False, revalidate_instances="always")

_NonNegative = Annotated[float, Field(ge=0)]


@dataclass(frozen=True)
class Estimate:
    """A mean over `count` units of observation (items, clusters or texts), with its standard error."""

    __pydantic_config__: ClassVar[ConfigDict] = _AS_IN_RECORDS

    value: float
    standard_error: _NonNegative
    count: Annotated[int, Field(ge=1)]

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the mean under the normal approximation."""
        return self.value - Z * self.standard_error, self.value + Z * self.standard_error

    def __format__(self, spec: str) -> str:
        return f"{self.value:{spec}} ± {self.standard_error:{spec}}"


@dataclass(frozen=True)
class Difference:
    """Second minus first on the same `count` items or clusters: mean, standard error and 95 % interval."""

    value: float
    standard_error: float
    low: float
    high: float
    count: int


@dataclass(frozen=True)
class Ratio:
    """A ratio of two figures with its 95 % interval."""

    __pydantic_config__: ClassVar[ConfigDict] = _AS_IN_RECORDS

    value: _NonNegative
    low: _NonNegative
    high: _NonNegative

    def __format__(self, spec: str) -> str:
        return f"{self.value:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"
