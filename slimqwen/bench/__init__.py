"""Speed of served variants: latency over workloads, and start-up times."""

from slimqwen.errors import SlimqwenError


class BenchError(SlimqwenError):
    """A speed cannot be measured here, or its figures would be meaningless; the message says why."""
