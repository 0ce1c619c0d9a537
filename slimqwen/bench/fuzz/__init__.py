"""Fuzz: hundreds of malformed requests to every endpoint of a server, and whether it serves as before."""

from slimqwen.bench.fuzz.measurement import write
from slimqwen.bench.fuzz.record import Fuzz

__all__ = ["Fuzz", "write"]
