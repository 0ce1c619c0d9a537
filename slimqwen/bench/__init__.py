"""Speed of served variants: latency over workloads, and start-up."""

from slimqwen.errors import SlimqwenError


class BenchError(SlimqwenError):
    """A measurement that cannot be made here, or whose figures would say nothing."""
