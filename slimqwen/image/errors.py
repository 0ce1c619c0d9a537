"""ImageError: an image that cannot be built, read or started."""

from slimqwen.errors import SlimqwenError


class ImageError(SlimqwenError):
    """An image that cannot be built, read or started."""
