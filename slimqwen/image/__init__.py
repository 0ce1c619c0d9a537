"""A variant as a container image: its content, its build, and the checks of a built one."""

from slimqwen.errors import SlimqwenError


class ImageError(SlimqwenError):
    """A container image cannot be built, read or started."""
