"""Speed of served variants: latency over workloads, and start-up times."""

from slimqwen.errors import SlimqwenError


class BenchError(SlimqwenError):
    """A measurement cannot be made here, or its figures would be meaningless."""
