"""Search for the variant to serve, and the executors that measure many variants on one or several machines."""

from slimqwen.errors import SlimqwenError


class SearchError(SlimqwenError):
    """A search or a proof cannot begin or cannot go on."""
