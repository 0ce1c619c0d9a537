"""A variant as a container image: what goes in, how it is built, and what a built one has to hold."""

from slimqwen.errors import SlimqwenError


class ImageError(SlimqwenError):
    """An image that cannot be built, read or started."""
