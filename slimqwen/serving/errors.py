"""ServingError, the error of this package; a faulty line of a config.env is a ConfigError of `slimqwen.variant`."""

from slimqwen.errors import SlimqwenError


class ServingError(SlimqwenError):
    """A server must not start or did not become ready, or an engine does not work."""
