"""Soak: a mixed load for a quarter of an hour or more, and whether the server's memory stays flat under it."""

from slimqwen.bench.soak.measurement import write
from slimqwen.bench.soak.record import Soak

__all__ = ["Soak", "write"]
