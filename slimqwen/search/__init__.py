"""Search and scale: which variant to serve, and the executors that measure many of them on one machine or several."""

from slimqwen.errors import SlimqwenError


class SearchError(SlimqwenError):
    """A search or a proof that cannot be made or cannot go on."""
