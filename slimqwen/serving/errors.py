"""ServingError: a server that cannot start; a faulty line of a config.env is a ConfigError of `slimqwen.variant`."""

from slimqwen.errors import SlimqwenError


class ServingError(SlimqwenError):
    """A server that may not start, did not become ready, or an engine that does not work."""
