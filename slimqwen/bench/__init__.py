"""Speed of served variants: latency, start-up, first requests, middleware, soaks."""

from slimqwen.errors import SlimqwenError


class BenchError(SlimqwenError):
    """A measurement that cannot be made here, or whose figures would say nothing."""
