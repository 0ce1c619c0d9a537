"""Latency and throughput of served variants over the prompt classes of a workload.

`rounds` has the variants take turns, `measured_variant` sends the requests of a class to one of them and keeps TTFT and
the other times, `figures` summarises these, `record` is the record kind. `speedups` makes the ratios of two records,
`tables` shows both.
"""

from slimqwen.bench.latency.record import Latency
from slimqwen.bench.latency.rounds import measure_latency
from slimqwen.bench.latency.tables import comparison

__all__ = ["Latency", "comparison", "measure_latency"]
