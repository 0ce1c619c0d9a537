"""Latency and throughput of served variants over the prompt classes of a workload.

`rounds` measures the variants in turns, `measured_variant` sends the requests of a class to one variant and keeps their
times, `figures` summarises them, `record` is the record kind. `speedups` computes the ratios of two records, `tables`
makes tables of records and ratios.
"""

from slimqwen.bench.latency.record import Latency
from slimqwen.bench.latency.rounds import measure_latency
from slimqwen.bench.latency.tables import comparison, give_verdict

__all__ = ["Latency", "comparison", "give_verdict", "measure_latency"]
